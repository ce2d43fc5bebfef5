"""A timeline as one small HTML page that needs nothing else: the SVG, to be scrolled, enlarged and tapped.

A phone has no pointer to hover with: a tap shows what an action is in a line at the bottom of the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from slipstream.schedule.plot.svg import to_svg
from slipstream.schedule.timeline import Timeline

_MOST_SPANS = 8_000
_STYLE = """
body{margin:0;font:15px/1.4 system-ui,sans-serif;color:#333a45;background:#fff}
header{display:flex;gap:.6em;align-items:center;padding:.7em 1em}
h1{font-size:1.05em;margin:0 auto 0 0}
button{font:inherit;min-width:2.4em;padding:.2em .5em;border:1px solid #c4cad3;border-radius:6px;background:#f6f7f9}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch;padding-bottom:3.4em}
svg{display:block;width:calc(100% * var(--zoom,1));min-width:calc(820px * var(--zoom,1));height:auto}
svg rect{cursor:pointer}
rect.chosen{stroke:#10141a;stroke-width:2}
#tip{position:fixed;left:0;right:0;bottom:0;padding:.6em 1em;background:#20242b;color:#fff;min-height:1.4em}
"""
_SCRIPT = """
let zoom = 1, chosen = null;
const root = document.documentElement, tip = document.getElementById('tip');
function enlarge(by) { zoom = Math.min(16, Math.max(1, zoom * by)); root.style.setProperty('--zoom', zoom); }
document.getElementById('in').onclick = () => enlarge(1.5);
document.getElementById('out').onclick = () => enlarge(1 / 1.5);
document.addEventListener('click', event => {
  const title = event.target.querySelector && event.target.querySelector('title');
  if (!title) return;
  if (chosen) chosen.classList.remove('chosen');
  chosen = event.target; chosen.classList.add('chosen');
  tip.textContent = title.textContent;
});
"""


def to_html(timelines: Mapping[str, Timeline], unit: str = "units") -> str:
    """One self-contained page."""
    svg = to_svg(timelines, unit, most_spans=_MOST_SPANS)
    title = escape(" and ".join(timelines))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{title}</title><style>{_STYLE}</style></head><body>
<header><h1>{title}</h1><button id="out" title="smaller">&minus;</button>
<button id="in" title="larger">+</button></header>
<div class="scroll">{svg}</div>
<div id="tip">Tap or click an action to see what it is; scroll sideways for the rest.</div>
<script>{_SCRIPT}</script></body></html>
"""

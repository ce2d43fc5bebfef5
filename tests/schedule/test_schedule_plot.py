"""The pictures: what is drawn is what the timeline says."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.errors import UserError
from slipstream.schedule import Costs, Timeline, build, plot, simulate

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str = "2bw", groups: int = 2, **costs) -> Timeline:
    return simulate(build(name, 3, 4, groups), Costs(**costs))


def printed(timelines: dict[str, Timeline], width: int, colours: bool = False) -> list[str]:
    console = Console(width=width, color_system="truecolor" if colours else None, force_terminal=colours)
    with console.capture() as capture:
        console.print(plot.terminal(timelines, width, colours))
    return capture.get().splitlines()


def test_terminal_draws_1f1b_to_scale() -> None:
    lines = printed({"1f1b": timeline("1f1b", 1)}, width=45)
    assert lines[:4] == [
        "1f1b",
        "stage 0  F0F1F2········B0--F3B1--··B2--··B3--"[:45],
        "stage 1  ··F0F1····B0--F2B1--F3B2--··B3--····"[:45],
        "stage 2  ····F0B0--F1B1--F2B2--F3B3--········"[:45],
    ]
    assert "18 units in all" in lines[4]


def test_terminal_numbers_groups_by_colour() -> None:
    lines = printed({"2bw": timeline(groups=3)}, width=100, colours=True)
    assert "48;2;156;203;255" in lines[1]  # a forward of group 0, blue
    assert "48;2;255;216;138" in lines[1]  # a forward of group 1, amber


@pytest.mark.parametrize("width", [20, 40, 80, 300])
@pytest.mark.parametrize("name", ["2bw", "zbv", "dualpipev"])
def test_terminal_fits_any_width(width: int, name: str) -> None:
    drawn = {"one": simulate(build(name, 4, 8, 3)), "two": simulate(build("gpipe", 4, 64, 3))}
    rows = [line for line in printed(drawn, width) if re.match(r" *(stage|rank) \d", line)]
    assert len(rows) == 8
    assert all(len(row) <= width for row in rows)


def test_terminal_says_where_it_stops() -> None:
    assert any(
        "the first 31 of 42 units in all" in line for line in printed({"x": timeline(groups=3)}, width=40)
    )


@pytest.mark.parametrize("width", [30, 80])
@pytest.mark.parametrize("name", ["2bw", "1f1b", "zbv", "dualpipev", "zb_h1"])
@pytest.mark.parametrize("stages", [4, 8])
def test_terminal_leaves_out_no_action(width: int, name: str, stages: int) -> None:
    """Every action up to where the picture ends has a cell, in order."""
    drawn = simulate(build(name, stages, 16, 3))
    rows = [line for line in printed({name: drawn}, width) if re.match(r" *(stage|rank) \d", line)]
    for row, actions in zip(rows, drawn.ranks, strict=True):
        shown = re.sub("[^A-Z]", "", row.split("  ", 1)[1])
        kinds = "".join(action.kind.value for action in actions if action.kind.value != "U")
        assert kinds.startswith(shown)
        assert len(shown) >= 5


def test_the_legend_explains_every_mark() -> None:
    legend = " ".join(" ".join(printed({"x": timeline()}, width=80)[5:]).split())
    assert "F0 forward" in legend
    assert "- is the rest of an action's time" in legend
    assert "left out where they do not fit" in legend


def mixed(stages: int = 3, microbatches: int = 6, cutover: int = 4) -> Timeline:
    return simulate(build("2bw", stages, microbatches, 3, cutover=cutover))


def small_letters(line: str) -> int:
    return len(re.findall(r"[fb]", line.split("  ", 1)[1]))


def test_terminal_has_small_letters_for_what_is_old() -> None:
    lines = printed({"2bw": mixed()}, width=200)
    for line, actions in zip(lines[1:4], mixed().ranks, strict=True):
        old = [action for action in actions if action.version is not None and action.version < action.group]
        assert small_letters(line) == sum(action.microbatch is not None for action in old) == 2 * 2 * 4
    assert any("Small letters: reads old weights." in line for line in lines)
    for alike in (6, 0):  # nothing to tell apart
        plain = printed({"2bw": mixed(cutover=alike)}, width=200)
        assert not any(small_letters(line) for line in plain[1:4])
        assert not any("reads old weights" in line for line in plain)


@pytest.mark.parametrize(
    ("stages", "microbatches", "cutover"), [(8, 24, 9), (4, 16, 5), (2, 64, 3), (4, 6, 5)]
)
def test_terminal_shows_some_of_what_is_old_in_any_width(
    stages: int, microbatches: int, cutover: int
) -> None:
    drawn = mixed(stages, microbatches, cutover)
    for width in (40, 80, 200):
        lines = printed({"2bw": drawn}, width)
        assert all(small_letters(line) for line in lines[1 : 1 + stages]), width
        note = lines[1 + stages].strip()
        if note.startswith("from"):
            first, last, end = map(float, re.findall(r"[\d.]+", note))
            assert 0 < first < last <= end == drawn.makespan


def test_pictures_are_lighter_where_it_is_old() -> None:
    drawn = mixed()
    root = ET.fromstring(plot.to_svg({"2bw": drawn}))
    fills: dict[bool, set[str]] = {True: set(), False: set()}
    for rect in root.iter(f"{SVG}rect"):
        tip = rect.findtext(f"{SVG}title") or ""
        if told := re.search(r"(forward|backward) .* group (\d+) · reads weights (\d+)", tip):
            fills[int(told[3]) < int(told[2])].add(rect.attrib["fill"])
    assert fills[True]
    assert not fills[True] & fills[False]

    def light(fill: str) -> int:
        return sum(int(fill[i : i + 2], 16) for i in (1, 3, 5))

    assert min(map(light, fills[True])) > min(map(light, fills[False]))
    assert "lighter: reads old weights" in plot.to_svg({"2bw": drawn})
    assert "lighter" not in plot.to_svg({"2bw": mixed(cutover=6)})


def test_svg_has_one_rectangle_per_action() -> None:
    picture = timeline(update=1.0)
    root = ET.fromstring(plot.to_svg({"<2bw> & more": picture}))
    tips = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert len(tips) == len(picture.spans)
    assert sum("update" in tip and "makes weights" in tip for tip in tips) == 6
    assert any("forward · microbatch 2 · group 1 · reads weights 0" in tip for tip in tips)
    assert any(text.text == "<2bw> & more" for text in root.iter(f"{SVG}text"))


def test_a_long_run_is_cut_and_says_so() -> None:
    long = simulate(build("2bw", 8, 64, 30))
    svg = plot.to_svg({"2bw": long})
    assert "(the first " in svg
    assert svg.count("<title>") <= 20_000
    page = plot.to_html({"2bw": long})
    assert page.count("<title>") <= 8_002
    assert "(the first " in page


def test_html_stands_alone_and_hover_tells_the_action() -> None:
    page = plot.to_html({"2bw": timeline(), "1f1b": timeline("1f1b")})
    assert not re.search(r"(src|href)=.?http", page)
    assert "backward · microbatch 3 · group 1 · reads weights 0" in page
    assert len(page) < 60_000
    assert 'name="viewport"' in page  # a phone shows it in its own width, and the picture scrolls
    assert "overflow-x:auto" in page


def test_a_measured_timeline_is_drawn_from_zero() -> None:
    late = Timeline.from_spans(
        span._replace(start=span.start + 1e6, end=span.end + 1e6) for span in timeline().spans
    )
    assert plot.to_svg({"x": late}).count("<rect") == plot.to_svg({"x": timeline()}).count("<rect")
    assert printed({"x": late}, 80) == printed({"x": timeline()}, 80)


def test_trace_is_what_perfetto_reads() -> None:
    picture = timeline(forward=0.01, backward=0.02)
    events = json.loads(plot.to_trace({"2bw": picture}))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(picture.spans)
    first = min(spans, key=lambda event: event["ts"])
    assert (first["name"], first["tid"]) == ("0F0g0v0", 0)
    assert first["dur"] == pytest.approx(10_000)  # microseconds
    assert first["args"] == {"stage": 0, "microbatch": 0, "group": 0, "version": 0}
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"2bw", "rank 2"}


def test_free_actions_still_draw() -> None:
    """All costs zero: nothing has a length, and nothing divides by it."""
    nothing = timeline(forward=0, backward=0)
    assert nothing.bubble_fraction == (0, 0, 0)
    for draw in (plot.to_svg, plot.to_html, plot.to_trace):
        assert draw({"nothing": nothing})
    assert printed({"nothing": nothing}, 60)


def test_save_goes_by_the_file_name(tmp_path: Path) -> None:
    for name, beginning in (("a.svg", "<svg"), ("a.html", "<!doctype html"), ("a.json", '{"traceEvents')):
        plot.save(tmp_path / name, {"2bw": timeline()})
        assert (tmp_path / name).read_text().startswith(beginning)
    with pytest.raises(UserError, match=r"a\.gif.*\.html, \.svg, \.json"):
        plot.save(tmp_path / "a.gif", {"2bw": timeline()})
    with pytest.raises(UserError, match="Cannot write"):
        plot.save(tmp_path / "missing" / "a.svg", {"2bw": timeline()})

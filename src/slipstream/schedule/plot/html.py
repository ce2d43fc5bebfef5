"""A timeline as an interactive picture: a plotly figure, and one HTML file that needs nothing else.

Plotly is imported on first use: it takes longer to load than everything else here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from slipstream.schedule.actions import Action, Kind
from slipstream.schedule.plot.palette import (
    WORDS,
    colour,
    describe,
    has_parts,
    ink,
    is_chunked,
    is_old,
    label,
    seconds,
)
from slipstream.schedule.timeline import Timeline

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_ROW_PIXELS, _MOST_SPANS = 30, 8_000


class _Lane(NamedTuple):
    """Where one timeline is drawn: a subplot, and the part of each rank's row it fills."""

    timeline: Timeline
    row: int
    offset: float = 0.0
    height: float = 0.86
    word: str = ""  # begins the tooltip


def to_html(timelines: Mapping[str, Timeline]) -> str:
    """One self-contained page."""
    return panels(timelines).to_html(include_plotlyjs=True, full_html=True, config={"displaylogo": False})


def panels(timelines: Mapping[str, Timeline]) -> Figure:
    """The timelines one under the other, on one time axis."""
    lanes = [_Lane(timeline, row) for row, timeline in enumerate(timelines.values(), start=1)]
    return _draw(lanes, list(timelines))


def figure(predicted: Timeline, measured: Timeline | None = None, title: str = "") -> Figure:
    """Each rank's row in two halves: the prediction above, the measurement below. Both begin at 0."""
    if measured is None:
        return panels({title or "predicted": predicted})
    return comparison({title or "schedule": (predicted, measured)})


def comparison(pairs: Mapping[str, tuple[Timeline, Timeline]]) -> Figure:
    """`figure` of each (predicted, measured) pair, one under the other, on one time axis."""
    lanes = []
    for row, (predicted, measured) in enumerate(pairs.values(), start=1):
        lanes.append(_Lane(predicted, row, offset=-0.22, height=0.4, word="predicted: "))
        lanes.append(_Lane(measured, row, offset=0.22, height=0.4, word="measured: "))
    return _draw(lanes, [f"{name}: predicted (upper half of a row), measured (lower half)" for name in pairs])


def _draw(lanes: list[_Lane], titles: list[str]) -> Figure:
    from plotly.subplots import make_subplots

    ranks = [
        max(len(lane.timeline.ranks) for lane in lanes if lane.row == row + 1) for row in range(len(titles))
    ]
    height = 150 + sum(ranks) * _ROW_PIXELS + 60 * len(titles)
    until = min(lane.timeline.time_of_span(_MOST_SPANS // len(lanes)) for lane in lanes)
    picture = make_subplots(
        rows=len(titles),
        cols=1,
        shared_xaxes=True,
        subplot_titles=titles,
        row_heights=ranks,
        vertical_spacing=min(0.9 / len(titles), 55 / height),
    )
    in_legend: set[Kind] = set()
    for lane in lanes:
        for kind, spans in _by_kind(lane.timeline, until).items():
            picture.add_trace(_bars(lane, kind, spans, kind not in in_legend), row=lane.row, col=1)
            in_legend.add(kind)
    for row, count in enumerate(ranks, start=1):
        word = "rank" if any(is_chunked(lane.timeline) for lane in lanes if lane.row == row) else "stage"
        picture.update_yaxes(
            row=row,
            col=1,
            range=[count - 0.5, -0.5],
            tickvals=list(range(count)),
            ticktext=[f"{word} {rank}" for rank in range(count)],
            showgrid=False,
            zeroline=False,
            fixedrange=True,
        )
    longest = max(lane.timeline.makespan for lane in lanes)
    end = min(longest, until)
    picture.update_xaxes(range=[0, end], showgrid=False, zeroline=False, showticklabels=True, ticks="outside")
    picture.update_xaxes(title_text="time", row=len(titles), col=1)
    picture.update_annotations(x=0, xanchor="left", font={"size": 15})
    picture.update_layout(
        barmode="overlay",
        height=height,
        template="plotly_white",
        plot_bgcolor="#eef0f3",
        font={"family": "system-ui, sans-serif", "size": 13},
        margin={"l": 80, "r": 30, "t": 90, "b": 50},
        legend={"orientation": "h", "y": 1, "yref": "container", "yanchor": "top", "x": 0},
        uniformtext={"minsize": 9, "mode": "hide"},
        title={
            "text": f"the first {seconds(end)} of {seconds(longest)}" if end < longest else None,
            "x": 1,
            "xanchor": "right",
            "font": {"size": 12},
        },
    )
    return picture


Drawn = tuple[int, Action, float, float]  # rank, action, start and end from the timeline's beginning


def _by_kind(timeline: Timeline, until: float) -> dict[Kind, list[Drawn]]:
    begin = timeline.begin
    found: defaultdict[Kind, list[Drawn]] = defaultdict(list)
    for rank, action, start, end in timeline.spans:
        if end > start and start - begin < until:
            found[action.kind].append((rank, action, start - begin, end - begin))
    return {kind: found[kind] for kind in Kind if kind in found}


def _bars(lane: _Lane, kind: Kind, spans: list[Drawn], show_legend: bool):
    from plotly.graph_objects import Bar

    chunked, parts = is_chunked(lane.timeline), has_parts(lane.timeline)
    actions = [(action, parts and is_old(action)) for _, action, _, _ in spans]
    return Bar(
        orientation="h",
        name=WORDS[kind] + (" (lighter: reads old weights)" if parts and kind is Kind.FORWARD else ""),
        legendgroup=kind.value,
        showlegend=show_legend,
        y=[rank + lane.offset for rank, *_ in spans],
        base=[start for _, _, start, _ in spans],
        x=[end - start for _, _, start, end in spans],
        width=lane.height,
        marker={"color": [colour(*action) for action in actions], "line": {"width": 0.5, "color": "#ffffff"}},
        text=[label(action) for action, _ in actions],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": [ink(*action) for action in actions]},
        customdata=[
            (lane.word + describe(action, chunked), seconds(start), seconds(end), seconds(end - start))
            for _, action, start, end in spans
        ],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]} to %{customdata[2]} (%{customdata[3]})"
        "<extra></extra>",
    )

"""The page without a browser: structure, escaping, thinning, size, prediction beside measurement."""

from __future__ import annotations

import json
import re

import pytest

from slipstream.errors import UserError
from slipstream.metrics.events import read_run
from slipstream.metrics.report import report, sections, write_report
from slipstream.metrics.report_columns import labels
from slipstream.metrics.report_page import (
    BUCKETS,
    KEPT_AS_THEY_ARE,
    Chart,
    Grid,
    Lanes,
    Section,
    Series,
    embed,
    page,
    thin,
)
from slipstream.metrics.report_timeline import delays, lanes, period, predict, spans
from slipstream.schedule.generate import build
from slipstream.schedule.simulate import Costs, simulate

from .conftest import COSTS, MICROBATCHES, STAGES, timeline_event

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def scripts(html: str) -> list[tuple[str, str]]:
    return re.findall(r"<script([^>]*)>(.*?)</script>", html, flags=re.DOTALL)


def test_one_page_holds_everything_and_loads_nothing(make_run):
    html = report([read_run(make_run())])
    for title in (
        "Loss by step",
        "Throughput",
        "gradient norm",
        "Memory per stage",
        "Delay of every microbatch",
    ):
        assert title in html
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?:https?:)?//""", html)
    assert not re.search(r"url\(['\"]?https?:", html)


def test_hostile_content_never_becomes_markup(make_run):
    hostile = [
        {"event": "sample", "step": 1, "prompt": ATTACK, "text": ATTACK},
        {"event": "warning", "step": 1, "message": ATTACK},
        {"event": "step", "step": 900, "loss": ATTACK, "busy": [ATTACK], "skipped": ATTACK},
        {
            "event": "timeline",
            "step": 1,
            "spans": [[0, ATTACK, 0, 0, 0, 0, 0.0, 1.0]],
            "predicted": {ATTACK: [1]},
        },
    ]
    folder = make_run(
        extra=hostile, config=f"# {ATTACK}\n['{ATTACK}']\n'{ATTACK}' = 1\n", environment={ATTACK: ATTACK}
    )
    html = report([read_run(folder)])
    assert "alert(1)" in html
    assert "<img" not in html
    assert [attributes for attributes, _ in scripts(html)] == [' type="application/json" id="charts"', ""]
    assert "alert(1)" not in scripts(html)[1][1]


def test_embedded_json_survives_the_escaping():
    value = {"a": "</script>&\u2028", "b": [1.5, float("nan"), None, 3.0]}
    text = embed(value)
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": "</script>&\u2028", "b": [1.5, None, None, 3]}


def test_policy_allows_exactly_our_own_script(make_run):
    import base64
    import hashlib

    html = report([read_run(make_run())])
    digest = base64.b64encode(hashlib.sha256(scripts(html)[1][1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    assert "default-src 'none'" in html


def test_thinning_keeps_extremes_mean_and_ends():
    count = 100_000
    values = [float(step % 97) for step in range(count)]
    values[54_321] = 1e6
    thinned = thin(Series("s", list(range(count)), values))
    assert len(thinned.x) == KEPT_AS_THEY_ARE + BUCKETS
    assert thinned.high is not None
    assert thinned.low is not None
    assert max(thinned.high) == 1e6
    assert min(thinned.low) == 0.0
    assert (thinned.x[0], thinned.x[-1]) == (0, count - 1)
    assert all(low <= y <= high for low, y, high in zip(thinned.low, thinned.y, thinned.high, strict=True))
    assert list(thinned.y[:KEPT_AS_THEY_ARE]) == values[:KEPT_AS_THEY_ARE]


def test_of_many_warnings_the_last_and_the_error_are_shown(make_run):
    warnings = [{"event": "warning", "step": n, "message": f"skipped {n}."} for n in range(1, 101)]
    error = {"event": "error", "step": 100, "message": "5 updates in a row were not finite."}
    folder = make_run(steps=100, finish=False, extra=[*warnings, error])
    html = report([read_run(folder)])
    assert "5 updates in a row were not finite." in html
    assert "61 earlier warnings are in events.jsonl" in html
    assert "skipped 100." in html
    assert "skipped 61." not in html


def test_short_series_are_left_alone():
    series = Series("s", [1, 2, 3], [1.0, 5.0, 2.0])
    assert thin(series) is series


def test_a_page_does_not_grow_with_the_steps_of_its_run(make_run):
    pages = [
        write_report(
            [make_run(str(steps), steps=steps, stages=2)], make_run(f"{steps}+").parent / "page.html"
        )
        for steps in (8_000, 16_000)
    ]
    first, second = (page.stat().st_size for page in pages)
    assert second < 1.1 * first


@pytest.mark.slow
def test_a_hundred_thousand_steps_stay_under_five_megabytes(make_run):
    out = write_report([make_run(steps=100_000, stages=2)], make_run("other").parent / "page.html")
    assert out.stat().st_size < 5_000_000


@pytest.mark.parametrize("state", ["empty", "config only", "crashed", "failed"])
def test_runs_that_went_wrong_still_give_a_page(make_run, state):
    folder = make_run(steps=0 if state == "empty" else 30, finish=False)
    events = folder / "events.jsonl"
    if state == "empty":
        events.write_text("")
    elif state == "config only":
        events.unlink()
    elif state == "crashed":
        events.write_text(events.read_text()[:-10])
    else:
        with events.open("a") as stream:
            stream.write(json.dumps({"event": "error", "step": 30, "message": "stage 2 died"}) + "\n")
    html = report([read_run(folder)])
    assert {
        "empty": "no step yet",
        "config only": "no step yet",
        "crashed": "could not be read",
        "failed": "stage 2 died",
    }[state] in html


def test_several_runs_are_overlaid_and_their_differences_named(make_run):
    first = make_run("a", config="[optim]\nlr = 0.1\nname = 'muon'\n")
    second = make_run("b", config="[optim]\nlr = 0.2\nname = 'muon'\n")
    runs = [read_run(first), read_run(second)]
    html = report(runs)
    assert "optim.lr" in html.split("Where the runs differ")[1].split("</table>")[0]
    assert "optim.name" not in html.split("Where the runs differ")[1].split("</table>")[0]
    loss = next(part for section in sections(runs) for part in section.parts if isinstance(part, Chart))
    assert [series.name for series in loss.series] == [
        "a: training",
        "a: validation",
        "b: training",
        "b: validation",
    ]


def test_a_run_that_was_started_again_says_what_it_cost(make_run):
    again = [
        {"event": "start", "time": 1e9 + 230, "step": 190, "stages": 3, "resumed": True, "lost_steps": 10,
         "heard_of": 1e9 + 200},
        {"event": "step", "time": 1e9 + 250, "step": 191, "loss": 1.0},
    ]  # fmt: skip
    html = report([read_run(make_run(extra=again, finish=False))])
    assert "Restarts" in html
    assert "10 updates done twice" in html
    assert "restart from disk" in html
    assert "Restarts" not in report([read_run(make_run("quiet"))])


def test_labels_are_distinct(make_run):
    runs = [read_run(make_run(name)) for name in ("x/run", "y/run", "other")]
    assert labels(runs) == ["x/run", "y/run", "other"]
    assert len(set(labels([runs[0], runs[0]]))) == 2


def test_a_run_that_follows_the_simulator_is_predicted_exactly():
    event = timeline_event(step=40)
    start = {"schedule": "2bw", "stages": STAGES, "microbatches": MICROBATCHES}
    measured = spans(event)
    predicted = predict(measured, COSTS, start)
    assert {bar[:6] for bar in predicted} == {bar[:6] for bar in measured}
    times = {bar[:6]: bar[6:] for bar in measured}
    assert all(bar[6:] == pytest.approx(times[bar[:6]]) for bar in predicted)
    assert period(measured) == pytest.approx(period(predicted))
    drawn = lanes(event, start, "t")
    assert isinstance(drawn, Lanes)
    assert "+0.0%" in drawn.note or "-0.0%" in drawn.note


@pytest.mark.parametrize("depth", [STAGES, MICROBATCHES])
def test_a_recording_that_begins_in_mid_run_is_laid_over_its_prediction(depth):
    """It begins with backwards of the group before, and with as many in flight as the engine chose."""
    schedule = build("2bw", stages=STAGES, microbatches=MICROBATCHES, groups=9, in_flight=depth)
    timeline = simulate(schedule, Costs(**COSTS))
    began = {
        span.rank: span.start
        for span in reversed(timeline.spans)
        if span.action.kind == "F" and (span.action.group, span.action.microbatch) == (4, 0)
    }
    rows = [
        [span.rank, *span.action, span.start, span.end]
        for span in timeline.spans
        if span.start >= began[span.rank] and span.action.group < 7
    ]
    event = {"event": "timeline", "step": 4, "spans": json.loads(json.dumps(rows)), "predicted": COSTS}
    measured = spans(event)
    assert any(bar[4] == 3 for bar in measured)
    start = {"schedule": "2bw", "stages": STAGES, "microbatches": MICROBATCHES}
    found = {bar[:5]: bar[6:] for bar in predict(measured, COSTS, start)}
    assert all(found[bar[:5]] == pytest.approx(bar[6:]) for bar in measured)


def test_a_timeline_without_costs_or_with_an_unknown_schedule_shows_the_measurement_alone():
    event = timeline_event(step=40)
    unknown = lanes(event, {"schedule": "1f1bb", "stages": STAGES, "microbatches": 4}, "t")
    assert unknown is not None
    assert unknown.measured
    assert not unknown.predicted
    assert "1f1b" in unknown.note
    assert lanes({**event, "predicted": {}}, {}, "t").predicted == []
    assert lanes({"event": "timeline", "spans": [[1, 2], "x", None]}, {}, "t") is None


def test_delay_is_one_on_every_stage_in_plain_2bw():
    grid = delays(timeline_event(step=40), "t")
    assert isinstance(grid, Grid)
    assert len(grid.cells) == STAGES
    assert {cell for row in grid.cells for cell in row} == {1}


def test_sections_without_parts_are_left_out():
    html = page("t", [Section("Bare"), Section("Something", [Chart("c", [Series("s", [1], [2.0])])])])
    assert "Bare" not in html
    assert html.count("<h2>") == 1


def test_the_page_lies_in_its_run_and_a_mistyped_run_leaves_nothing_behind(make_run, tmp_path):
    folder = make_run(steps=2)
    assert write_report([folder / "events.jsonl"]) == write_report([folder]) == folder / "report.html"
    with pytest.raises(UserError, match="There is no run folder"):
        write_report([tmp_path / "mistyped"], tmp_path / "mistyped" / "report.html")
    assert not (tmp_path / "mistyped").exists()

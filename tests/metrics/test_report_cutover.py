"""What the report says of the cutover: how much is old, who waits for the newest weights, and what that costs."""

from __future__ import annotations

import json
import re

import pytest

from slipstream.metrics.events import read_run
from slipstream.metrics.report import report
from slipstream.metrics.report_timeline import at_cutover, spans
from slipstream.schedule.generate import build
from slipstream.schedule.simulate import Costs, simulate

FORWARD, BACKWARD = 0.010, 0.020


def recorded(stages, m, cutover, first=4, last=7, in_flight=None, **costs):
    """The event of a run that followed the simulator, and how many times as long it took as one with all old."""
    given = Costs(forward=FORWARD, backward=BACKWARD, **costs)
    made, whole = (
        simulate(build("2bw", stages, m, 10, cutover=c, in_flight=in_flight), given) for c in (cutover, m)
    )
    rows = [
        [span.rank, *span.action, span.start, span.end]
        for span in made.spans
        if first <= span.action.group < last
    ]
    per_stage = {"forward": [FORWARD] * stages, "backward": [BACKWARD] * stages}
    per_stage |= {"update": [costs["update"]] * stages} if "update" in costs else {}
    event = {
        "event": "timeline",
        "step": first,
        "spans": json.loads(json.dumps(rows)),
        "predicted": per_stage,
    }
    return event, made.time_per_update / whole.time_per_update


def said(stages, m, cutover, **options):
    event, ratio = recorded(stages, m, cutover, **options)
    start = {"schedule": "2bw", "stages": stages, "microbatches": m, "cutover": cutover}
    return at_cutover(spans(event), event["predicted"], start), ratio


@pytest.mark.parametrize(("stages", "m"), [(4, 8), (8, 24)])
@pytest.mark.parametrize("update", [{}, {"update": 0.002, "update_latency": 0.002}])
def test_a_free_cutover_is_said_to_be_free(stages, m, update):
    for cutover in (stages, stages + 1, m - 1):
        text, ratio = said(stages, m, cutover, **update)
        assert ratio == pytest.approx(1.0, abs=1e-3)
        assert (
            text == f" Cutover: {cutover} of {m} microbatches are old. No rank waits for the newest weights."
        )
    assert said(stages, m, m)[0] == f" Cutover: all {m} microbatches are old, as in PipeDream-2BW."


@pytest.mark.parametrize("cutover", [4, 5, 7])
def test_a_slow_link_is_no_wait_at_the_cutover(cutover):
    text, ratio = said(4, 8, cutover, latency=0.003)
    assert ratio == pytest.approx(1.0, abs=1e-3)
    assert text.endswith("No rank waits for the newest weights.")


@pytest.mark.parametrize(("stages", "m"), [(4, 8), (8, 24)])
def test_what_waits_is_said_with_its_cost(stages, m):
    for cutover in (0, 1, stages // 2):
        text, ratio = said(stages, m, cutover)
        assert f"{cutover} of {m} microbatches are old. Rank " in text
        assert "% of an update) for the newest weights." in text
        told = re.search(r"an update takes ([\d.]+) times as long as if all were old\.$", text)
        assert told
        assert float(told[1]) == pytest.approx(ratio, abs=0.0051)
    text, ratio = said(stages, m, stages, update_latency=0.05)  # which the costs of a run do not hold
    assert ratio > 1.02
    assert "waits 20 ms" in text


def test_nothing_is_said_where_a_run_has_no_cutover_or_does_not_tell():
    event, _ = recorded(4, 8, 5)
    for start in ({}, {"schedule": "2bw", "stages": 4, "microbatches": 8}):
        assert at_cutover(spans(event), event["predicted"], start) == ""
    for schedule in ("1f1b", "emulate", "nobody's"):
        start = {"schedule": schedule, "stages": 4, "microbatches": 8, "cutover": 5}
        assert at_cutover(spans(event), event["predicted"], start) == ""
    start = {"schedule": "2bw", "stages": 4, "microbatches": 8, "cutover": 5}
    for costs in (None, {}, {"forward": "x"}, {"forward": [1.0]}):
        assert "5 of 8 microbatches are old. No rank waits" in at_cutover(spans(event), costs, start)


def test_a_timeline_is_that_of_the_start_before_it(make_run):
    """The run goes on with another number of stages and records no other timeline."""
    event, _ = recorded(4, 8, 5)
    starts = [
        {"event": "start", "time": 1e9, "step": step, "stages": stages, "data_ranks": 1, "schedule": "2bw",
         "microbatches": 8, "cutover": 5, "parameters": 10, "resumed": bool(step)}
        for step, stages in ((0, 4), (10, 2))
    ]  # fmt: skip
    folder = make_run(steps=0, extra=[starts[0], {**event, "time": 1e9}, starts[1]])
    html = report([read_run(folder)])
    assert "Cutover: 5 of 8 microbatches are old. No rank waits" in html
    assert "No prediction" not in html

"""How clock readings become figures, on readings made by hand."""

from __future__ import annotations

from statistics import fmean

import pytest

from slipstream.bench import measure as measuring
from slipstream.bench.measure import Result, measure, parse_rivals, summarise
from slipstream.bench.report import record
from slipstream.bench.sample import RankSample, rotated
from slipstream.bench.work import Work
from slipstream.errors import UserError
from slipstream.schedule.actions import Kind
from slipstream.schedule.costs import Costs
from slipstream.schedule.cutover import default_cutover
from slipstream.schedule.generate import build
from slipstream.schedule.simulate import simulate

# Two stages, updates every 10 s; the last stage is 3 s late at the start, the first 2 s late at the end.
RANKS = [
    RankSample(100.0, (115.0, 125.0, 135.0, 145.0), 145.5, 8.0),
    RankSample(100.5, (113.0, 123.0, 133.0, 143.0), 143.0, 12.0),
]


class ScriptedPool:
    """Stands in for the processes: answers with readings of a set period, or fails."""

    def __init__(self, periods: dict[str, float | str]) -> None:
        self.periods = periods
        self.asked: list[str | list[str]] = []

    def run(
        self, function, names, work: Work, warmup: int, updates: int, rounds: int | None = None, **options
    ):
        self.asked.append(names)
        if rounds is None:
            return [self.answer(names, updates)] * work.stages
        return [[{name: self.answer(name, updates) for name in names}] * rounds] * work.stages

    def answer(self, name: str, updates: int) -> RankSample:
        period = self.periods[name]
        if isinstance(period, str):
            raise UserError(period)
        ends = tuple(period * (index + 1) for index in range(updates))
        return RankSample(0.0, ends, ends[-1], 0.25 * updates, 1)


def test_fill_steady_state_and_drain_add_up_to_the_wall_clock() -> None:
    sample = summarise("slipstream", RANKS)
    assert (sample.period_seconds, sample.fill_seconds, sample.drain_seconds) == (10.0, 3.0, 2.5)
    assert sample.fill_seconds + 4 * sample.period_seconds + sample.drain_seconds == 145.5 - 100.0
    assert sample.cpu_seconds == (2.0, 3.0)


def test_the_slowest_rank_counts_in_the_bound_only() -> None:
    ranks = [
        RankSample(0.0, (1.0, 2.0, 3.0, 4.0), 4.0, 0.0),
        RankSample(0.0, (1.0, 4.0, 7.0, 10.0), 10.0, 0.0),
    ]
    assert summarise("bound", ranks).period_seconds == 3.0
    assert summarise("torch_1f1b", ranks).period_seconds == 2.0


def sample_of(stages: int, m: int, updates: int, *, all_old: bool) -> list[RankSample]:
    """By the clockwork, with links and an exchange that take time."""
    cutover = m if all_old else default_cutover(stages, m, on_host=True)
    in_flight = min(4 * stages - 3 if all_old else 2 * stages - 1, m + 1)
    costs = Costs(forward=1.0, backward=2.0, update=0.4, latency=0.06, update_latency=0.03)
    timeline = simulate(
        build("pipedream_2bw", stages, m, updates, in_flight=in_flight, cutover=cutover), costs
    )
    ranks = []
    for row, ends in zip(timeline.ranks, timeline.ends, strict=True):
        groups = tuple(
            end
            for action, end in zip(row, ends, strict=True)
            if action.kind is Kind.BACKWARD and action.microbatch == m - 1
        )
        ranks.append(RankSample(0.0, groups, ends[-1], 0.0))
    return ranks


@pytest.mark.parametrize("all_old", [False, True])
@pytest.mark.parametrize(("stages", "m"), [(2, 2), (2, 4), (4, 4), (4, 8), (4, 12), (8, 8), (8, 16), (8, 24)])
def test_a_sample_has_the_period_of_an_endless_run(stages: int, m: int, all_old: bool) -> None:
    """With its first and last update it was up to 2.9 % shorter, the most where m = P."""
    endless = [rank.ends for rank in sample_of(stages, m, 60, all_old=all_old)]
    period = fmean((ends[40] - ends[20]) / 20 for ends in endless)
    ranks = sample_of(stages, m, 2 + max(8, 64 // m), all_old=all_old)
    sample = summarise("slipstream", ranks)
    assert sample.period_seconds == pytest.approx(period, rel=0.004)
    wall = sample.fill_seconds + len(ranks[0].ends) * sample.period_seconds + sample.drain_seconds
    assert wall == pytest.approx(max(rank.finish for rank in ranks))


NAMES = ["bound", "torch_1f1b", "torch_zbv", "slipstream"]
PERIODS = {"bound": 1.0, "torch_1f1b": 1.5, "torch_zbv": "Broken: on purpose", "slipstream": 1.25}
WARM_UP = "bound"


def test_on_a_gpu_that_cannot_hold_all_at_once_every_sample_is_of_one_alone(monkeypatch) -> None:
    monkeypatch.setattr(measuring, "_device_bytes", lambda: 2)
    pool, work = ScriptedPool(PERIODS), Work(kind="language", device="cuda")
    result = measure(pool, work, NAMES, rounds=2, updates=4, timeout_seconds=1)  # type: ignore[arg-type]
    alone = [WARM_UP, *NAMES[:3], WARM_UP, NAMES[3]]
    assert pool.asked == [*alone, "bound", "torch_1f1b", "slipstream", "torch_1f1b", "slipstream", "bound"]
    assert {name: len(taken) for name, taken in result.samples.items()} == {
        "bound": 2, "torch_1f1b": 2, "slipstream": 2,
    }  # fmt: skip


def test_memory_of_all_contenders_is_what_they_hold_and_what_the_hungriest_takes_more() -> None:
    result = Result(
        Work(), peak_memory_bytes={"a": (10, 20), "b": (14, 15)}, held_bytes={"a": (4, 5), "b": (6, 7)}
    )
    assert result.together_bytes == (4 + 6 + 8) + (5 + 7 + 15)


def test_turns_rotate() -> None:
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_those_that_run_alone_take_turns(monkeypatch, device) -> None:
    monkeypatch.setattr(measuring, "_device_bytes", lambda: 100)
    pool, work = ScriptedPool(PERIODS), Work(kind="language", device=device)
    result = measure(pool, work, NAMES, rounds=7, updates=4, timeout_seconds=1)  # type: ignore[arg-type]
    left = ["bound", "torch_1f1b", "slipstream"]
    assert pool.asked == [WARM_UP, *NAMES[:3], WARM_UP, NAMES[3], left, left], "built anew after five rounds"
    assert all(len(result.samples[name]) == 7 for name in left)
    row = record(result)
    assert row["errors"] == {"torch_zbv": "Broken: on purpose"}
    assert row["torch_zbv_ms"] is None
    assert (row["best_sync"], row["best_sync_ms"]) == ("torch_1f1b", 1500.0)
    assert (row["speedup_over_1f1b"], row["fraction_of_bound"]) == (1.2, 0.8)
    assert row["peak_memory_bytes"]["slipstream"] == [1, 1]
    assert row["cpu_ms"]["slipstream"] == [250.0, 250.0]


def test_our_own_failure_is_an_error_not_a_row() -> None:
    pool = ScriptedPool({"bound": 1.0, "slipstream": "stage 1 stalled"})
    with pytest.raises(UserError, match="stage 1 stalled"):
        measure(pool, Work(), ["bound", "slipstream"], rounds=1, updates=4, timeout_seconds=1)  # type: ignore[arg-type]


def test_latency_leaves_torchs_schedules_out_and_says_so() -> None:
    pool = ScriptedPool({"bound": 1.0, "slipstream": 1.0})
    work = Work(link_latency_seconds=0.003)
    names = ["bound", "torch_1f1b", "slipstream"]
    row = record(measure(pool, work, names, rounds=1, updates=4, timeout_seconds=1))  # type: ignore[arg-type]
    assert "no injected link latency" in row["errors"]["torch_1f1b"]
    assert row["speedup_over_1f1b"] is None
    assert row["fraction_of_bound"] == 1.0


def test_rivals_are_named_without_their_prefix() -> None:
    assert parse_rivals("none") == []
    assert len(parse_rivals("all")) == 5
    assert parse_rivals("1f1b,zbv") == ["torch_1f1b", "torch_zbv"]
    with pytest.raises(UserError, match="Did you mean 'gpipe'"):
        parse_rivals("gpip")

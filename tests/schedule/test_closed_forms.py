"""The simulator against the closed forms of the literature, over a grid and at random."""

from __future__ import annotations

from functools import cache
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import UserError
from slipstream.schedule import Costs, Timeline, build, simulate
from slipstream.schedule.actions import from_text, to_text
from slipstream.schedule.cutover import default_cutover, free_cutover
from slipstream.schedule.occupancy import banks, peak_activations, peak_rank_activations
from slipstream.schedule.staleness import gradients, staleness
from slipstream.schedule.validate import check

STAGES = (1, 2, 3, 4, 7, 8, 13, 16)
MICROBATCHES = (1, 2, 3, 5, 8, 16, 31, 64)
EXACT = 1e-12

stages_up_to_16 = st.integers(1, 16)
microbatches_up_to_64 = st.integers(1, 64)


def run(
    name: str, stages: int, microbatches: int, groups: int, costs: Costs | None = None, **options
) -> Timeline:
    return simulate(build(name, stages, microbatches, groups, **options), costs)


def assert_bubble(timeline: Timeline, expected: float) -> None:
    assert timeline.bubble_fraction == pytest.approx([expected] * len(timeline.ranks), abs=EXACT)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_flushed_bubble_on_a_grid(name: str, stages: int, microbatches: int) -> None:
    timeline = run(name, stages, microbatches, groups=2)
    assert_bubble(timeline, (stages - 1) / (microbatches + stages - 1))
    assert timeline.time_per_update == pytest.approx((microbatches + stages - 1) * 3, rel=EXACT)


@settings(max_examples=60, deadline=None)
@given(stages_up_to_16, microbatches_up_to_64, st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 3))
def test_flushed_bubble_whatever_the_uniform_costs(stages, microbatches, name, groups) -> None:
    costs = Costs(forward=0.75, backward=1.25)
    assert_bubble(run(name, stages, microbatches, groups, costs), (stages - 1) / (microbatches + stages - 1))


@settings(max_examples=80, deadline=None)
@given(stages_up_to_16, microbatches_up_to_64, st.integers(1, 2))
def test_zero_bubble_forms(stages, microbatches, groups) -> None:
    """With F = I = W; a schedule needs enough microbatches to fill its warm-up: P, and 2P-1 on the V."""
    if microbatches >= stages:
        assert_bubble(
            run("zb_h1", stages, microbatches, groups), (stages - 1) / (3 * microbatches + stages - 1)
        )
    if microbatches >= 2 * stages - 1:
        assert_bubble(
            run("zbv", stages, microbatches, groups), (stages - 1) / (6 * microbatches + stages - 1)
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(2, 4))
def test_chunked_forms(stages, rounds, chunks) -> None:
    """Interleaving divides the bubble by the chunks; DualPipeV, without its overlap, has ZB-V's."""
    microbatches = rounds * stages
    interleaved = run("interleaved_1f1b", stages, microbatches, 1, chunks=chunks)
    assert_bubble(interleaved, (stages - 1) / (chunks * microbatches + stages - 1))
    if rounds >= 2:
        assert_bubble(
            run("dualpipev", stages, microbatches, 1), (stages - 1) / (6 * microbatches + stages - 1)
        )


@settings(max_examples=80, deadline=None)
@given(stages_up_to_16, microbatches_up_to_64, st.data())
def test_2bw_has_no_bubble(stages, microbatches, data) -> None:
    microbatches = max(stages, microbatches)
    in_flight = data.draw(st.integers(stages, microbatches + 1))
    timeline = run("2bw", stages, microbatches, 4, in_flight=in_flight)
    assert_bubble(timeline, 0.0)
    flushed = run("1f1b", stages, microbatches, 2)
    gain = flushed.time_per_update / timeline.time_per_update
    assert gain == pytest.approx((microbatches + stages - 1) / microbatches, rel=EXACT)


@settings(max_examples=60, deadline=None)
@given(stages_up_to_16, microbatches_up_to_64)
def test_activations_in_flight(stages, microbatches) -> None:
    for name in ("1f1b", "pipedream", "paci", "pipedream_2bw"):
        if name == "pipedream_2bw" and microbatches < stages:
            continue
        schedule = build(name, stages, microbatches, 2)
        total = microbatches if schedule.synchronous else 2 * microbatches
        expected = [min(stages - s, total) for s in range(stages)]
        assert list(peak_activations(schedule.ranks, stages)) == expected
    assert set(peak_activations(build("gpipe", stages, microbatches, 2).ranks, stages)) == {microbatches}


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_zero_bubble_schedules_keep_1f1b_peak_memory(stages: int) -> None:
    microbatches = 3 * stages
    assert set(peak_rank_activations(build("zb_h1", stages, microbatches).ranks)) == {stages}
    # two chunks per rank, each half a stage
    assert set(peak_rank_activations(build("zbv", stages, microbatches).ranks)) == {2 * stages}


@settings(max_examples=60, deadline=None)
@given(stages_up_to_16, microbatches_up_to_64, st.data())
def test_2bw_warm_up_deepens_with_in_flight(stages, microbatches, data) -> None:
    microbatches = max(stages, microbatches)
    in_flight = data.draw(st.integers(stages, microbatches + 1))
    schedule = build("2bw", stages, microbatches, 3, in_flight=in_flight)
    expected = [ceil((in_flight - 1) * (stages - 1 - s) / max(stages - 1, 1)) + 1 for s in range(stages)]
    if stages == 1:
        expected = [in_flight]
    assert list(peak_activations(schedule.ranks, stages)) == expected
    assert set(banks(schedule.ranks, stages)) == {2}


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8, 16])
def test_pipedream_delays_and_stash(stages: int) -> None:
    schedule = build("pipedream", stages, 2 * stages, 3)
    assert staleness(schedule).delay == tuple(stages - 1 - s for s in range(stages))
    assert staleness(schedule).mismatch == (0,) * stages
    # A stage with w = P-1-s in flight ahead stashes w versions beside the newest; the last needs none.
    assert banks(schedule.ranks, stages) == tuple(stages - s for s in range(stages))


@settings(max_examples=80, deadline=None)
@given(stages_up_to_16, microbatches_up_to_64, st.integers(1, 20))
def test_paci_mismatch_bound(stages, microbatches, every) -> None:
    schedule = build("paci", stages, microbatches, 3, every=every)
    worst = staleness(schedule).mismatch
    assert max(worst) <= ceil((stages - 1) / every)
    for stage, value in enumerate(worst):
        assert value <= ceil((stages - 1 - stage) / every)
    assert banks(schedule.ranks, stages) == (1,) * stages


def test_paci_mismatch_bound_is_reached() -> None:
    assert max(staleness(build("paci", 8, 32, 3, every=3)).mismatch) == ceil(7 / 3)


@settings(max_examples=60, deadline=None)
@given(stages_up_to_16, microbatches_up_to_64, st.data())
def test_2bw_delay_is_exactly_one_from_group_one(stages, microbatches, data) -> None:
    microbatches = max(stages, microbatches)
    in_flight = data.draw(st.integers(stages, microbatches + 1))
    schedule = build("2bw", stages, microbatches, 3, in_flight=in_flight)
    for gradient in gradients(schedule):
        assert gradient.delay == min(gradient.group, 1)
        assert gradient.mismatch == 0
        assert gradient.update == gradient.group


def test_method_latency_figures() -> None:
    """P = 8, F 10 ms, B 20 ms: 1 ms of latency leaves 0.945 of the bound, 3 ms 0.851; depth hides it."""
    for latency, share in ((0.001, 0.945), (0.003, 0.851)):
        costs = Costs(forward=0.010, backward=0.020, latency=latency)
        timeline = run("2bw", 8, 16, 8, costs)
        assert 16 * 0.030 / timeline.time_per_update == pytest.approx(share, abs=0.0006)
        assert timeline.time_per_update / 16 == pytest.approx(0.030 + 2 * 7 * latency / 8, rel=1e-9)
        deeper = run("2bw", 8, 16, 8, costs, in_flight=15)
        assert deeper.time_per_update == pytest.approx(16 * 0.030, rel=1e-9)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_a_cutover_of_the_warm_up_and_one_is_the_least_without_a_bubble(stages: int, factor: int) -> None:
    """c = w_0 + 1 = P: z_g is there, on every stage, one pair after stage 0's last backward of group g-1."""
    m = factor * stages
    costs = Costs(forward=1.0, backward=2.0, update=0.5, update_latency=0.2)

    @cache
    def time(cutover: int | None, in_flight: int | None = None) -> float:
        schedule = build("pipedream_2bw", stages, m, 10, cutover=cutover, in_flight=in_flight)
        check(schedule)
        return simulate(schedule, costs).time_per_update

    free = free_cutover(stages, m)
    assert free == min(m, stages)
    assert time(free) == pytest.approx(time(None)) == pytest.approx(3 * m + 0.5)
    if stages > 1:
        assert time(free - 1) > time(free)
        assert [time(c) for c in range(free)] == sorted((time(c) for c in range(free)), reverse=True)
        assert time(0) == pytest.approx(3 * (m + stages - 1) + 0.7, rel=0.02), "a flush, as 1F1B"
    deep = min(m, 2 * stages - 1)  # more in flight wants a larger cutover
    assert time(free_cutover(stages, m, deep), deep) == pytest.approx(time(None))


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("link", [0.1, 0.3, 1.5])
def test_links_that_depth_hides_need_a_cutover_of_that_depth_less_one(
    stages: int, factor: int, link: float
) -> None:
    """c = w_0 = 2P - 2: no stage waits where an update takes no time; with one less, for two links an update."""
    m, deep = factor * stages, 2 * stages - 1

    def time(cutover: int) -> float:
        schedule = build("pipedream_2bw", stages, m, 10, in_flight=deep, cutover=cutover)
        return simulate(schedule, Costs(forward=1.0, backward=2.0, latency=link)).time_per_update

    assert time(deep - 1) == pytest.approx(3 * m)
    if stages > 2:
        assert time(deep - 2) == pytest.approx(3 * m + 2 * link)
        assert time(deep - 3) > time(deep - 2) + 0.9, "the next costs a share of a pair, whatever the links"


def test_the_default_cutover() -> None:
    assert [default_cutover(stages, 64) for stages in (1, 2, 4, 8)] == [1, 3, 5, 9]
    assert [default_cutover(stages, 64, on_host=True) for stages in (1, 2, 4, 5, 8)] == [1, 3, 5, 7, 13]
    assert default_cutover(8, 8, on_host=True) == default_cutover(8, 8) == 8


@pytest.mark.parametrize("cutover", [0, 1, 3, 4, 6, 8])
def test_a_cutover_makes_exactly_its_microbatches_old(cutover: int) -> None:
    schedule = build("pipedream_2bw", 4, 8, 5, cutover=cutover)
    for gradient in gradients(schedule):
        assert gradient.mismatch == 0
        assert gradient.delay == int(gradient.group > 0 and gradient.microbatch < cutover)
    assert from_text(to_text(schedule)) == schedule


def test_a_cutover_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="does not fit into 8 microbatches"):
        build("2bw", 4, 8, cutover=9)
    with pytest.raises(UserError, match="does not take 'cutover'"):
        build("1f1b", 4, 8, cutover=4)

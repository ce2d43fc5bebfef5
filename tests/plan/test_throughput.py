"""Predicted seconds: closed forms where they are exact, and the laws that any layout obeys."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from slipstream.models.cut import Layers
from slipstream.models.sizes import forward_flops_per_token, preset
from slipstream.plan.devices import find_device
from slipstream.plan.memory import BF16
from slipstream.plan.parts import build_model, newton_schulz_flops, stage_parts, stage_seconds
from slipstream.plan.throughput import (
    Network,
    Shape,
    StageTimes,
    estimate,
    place,
    rank_of,
    reduction_seconds,
    simulated,
    stage_times,
    with_cutover,
)
from slipstream.schedule.generate import build

DEVICE = find_device("h100")


def times(
    stages: int, *, update=0.0, reduction=0.0, latency=0.0, forward=1.0, backward=2.0, chunks=1
) -> StageTimes:
    count = stages * chunks
    return StageTimes(
        forward=(forward / chunks,) * count,
        backward=(backward / chunks,) * count,
        update=(update / chunks,) * count,
        reduction=(reduction,) * count,
        norm=0.0,
        message_bytes=0.0,
        network=Network((latency,) * (stages - 1), 1e12, 1e12, 0.0),
    )


def shape(schedule: str, stages: int, microbatches: int, **rest) -> Shape:
    return Shape(schedule, stages, 1, microbatches, 1, **rest)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 4), (4, 4), (4, 16), (8, 32)])
def test_equal_stages_and_free_links_take_the_closed_form(stages, microbatches):
    flushed = simulated(times(stages), shape("1f1b", stages, microbatches)).seconds
    assert flushed == pytest.approx(3 * (microbatches + stages - 1))
    assert estimate(times(stages), shape("1f1b", stages, microbatches)) == pytest.approx(flushed)
    if stages > 1:
        free = simulated(times(stages), shape("pipedream_2bw", stages, microbatches)).seconds
        assert free == pytest.approx(3 * microbatches)
        assert estimate(times(stages), shape("pipedream_2bw", stages, microbatches)) == pytest.approx(free)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev"])
def test_the_closed_form_of_a_synchronous_schedule_is_within_a_few_percent(schedule):
    layout = shape(schedule, 4, 16)
    given = times(4, update=0.5, latency=0.01, chunks=layout.chunks)
    assert estimate(given, layout) == pytest.approx(simulated(given, layout).seconds, rel=0.06)


def test_a_reduction_hides_in_the_slack_of_2bw_but_not_before_a_barrier():
    """m - w_s pairs of slack on stage 0: 16 - 3 pairs of 3 seconds."""
    layout = shape("pipedream_2bw", 4, 16)
    plain = simulated(times(4), layout).seconds
    assert simulated(times(4, reduction=30.0), layout).seconds == pytest.approx(plain)
    assert simulated(times(4, reduction=100.0), layout).seconds > plain + 10
    barrier = shape("1f1b", 4, 16)
    exposed = simulated(times(4, reduction=30.0), barrier).seconds - simulated(times(4), barrier).seconds
    assert exposed == pytest.approx(30.0 - 2.0)  # all but what the last backward covers


def test_a_long_chain_at_large_m_is_not_extrapolated_from_small_m():
    """Short groups are paced by the chain, long ones by the work: m of them never take less than the work."""
    slow = simulated(times(4, reduction=100.0), shape("pipedream_2bw", 4, 400)).seconds
    assert slow == pytest.approx(1200.0)


def test_deeper_warm_up_hides_latency():
    slow = times(4, latency=0.3)
    least = simulated(slow, shape("pipedream_2bw", 4, 16)).seconds
    deep = simulated(slow, shape("pipedream_2bw", 4, 16, in_flight=7)).seconds
    assert deep == pytest.approx(48.0, rel=0.01)
    assert least > 1.1 * deep


def test_jitter_costs_time():
    layout = shape("pipedream_2bw", 4, 16)
    assert simulated(times(4), layout, jitter=0.2).seconds > simulated(times(4), layout).seconds


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv", "dualpipev"])
def test_ranks_hold_the_stages_that_the_schedule_says(schedule):
    layout = shape(schedule, 4, 8)
    assert build(schedule, 4, 8).placement() == {s: rank_of(s, layout) for s in range(layout.model_stages)}


def test_flops_of_the_parts_add_up_to_the_model():
    config = preset("smollm2-360m")
    device = replace(DEVICE, layer_overhead=0.0)
    model = build_model(config, 1024, device, BF16)
    forward, backward = stage_seconds(stage_parts(model, Layers(0, config.layers)), 3, checkpointing=False)
    flops = 3 * 1024 * forward_flops_per_token(config, 1024)
    assert forward == pytest.approx(flops / (device.peak_flops * device.efficiency))
    assert backward == pytest.approx(2 * forward)
    assert stage_seconds(stage_parts(model, Layers(0, config.layers)), 3, True)[1] == pytest.approx(
        3 * forward
    )


def test_newton_schulz_flops_are_those_of_its_three_products():
    rows, columns, steps = 64, 256, 5
    assert newton_schulz_flops(columns, rows) == steps * (
        2 * rows * rows * columns + 2 * rows * rows * rows + 2 * rows * rows * columns
    )


def test_placement_decides_which_axis_crosses_nodes():
    inside = place(DEVICE, stages=8, data_ranks=8, pipeline_inside=True)
    assert set(inside.link_latency) == {DEVICE.intra_latency}
    assert inside.data_bandwidth == DEVICE.inter_bandwidth  # one data rank of a stage per node
    outside = place(DEVICE, stages=8, data_ranks=8, pipeline_inside=False)
    assert set(outside.link_latency) == {DEVICE.inter_latency}
    assert outside.data_bandwidth == DEVICE.intra_bandwidth
    long = place(DEVICE, stages=16, data_ranks=1, pipeline_inside=True)
    assert long.link_latency.count(DEVICE.inter_latency) == 1


def test_reduction_grows_with_data_ranks_and_sharding_sends_less():
    model = build_model(preset("smollm2-360m"), 1024, DEVICE, BF16)
    parts = stage_parts(model, Layers(4, 8))

    def seconds(ranks: int, shard: bool = False) -> float:
        layout = Shape("1f1b", 4, ranks, 8, 1, shard_optimizer=shard)
        return reduction_seconds(parts, layout, place(DEVICE, 4, ranks, True), BF16)

    assert seconds(1) == 0.0
    assert seconds(2) < seconds(4) < seconds(16)
    assert seconds(16, shard=True) < seconds(16)


def test_stage_times_follow_microbatch_size_and_checkpointing():
    model = build_model(preset("smollm2-360m"), 1024, DEVICE, BF16)
    cut = [Layers(0, 16), Layers(16, 32)]
    small = stage_times(model, cut, Shape("1f1b", 2, 1, 8, 1), DEVICE, "muon", BF16)
    large = stage_times(model, cut, Shape("1f1b", 2, 1, 4, 2), DEVICE, "muon", BF16)
    again = stage_times(model, cut, Shape("1f1b", 2, 1, 8, 1, checkpointing=True), DEVICE, "muon", BF16)
    assert small.forward[0] < large.forward[0] < 2 * small.forward[0]  # the overhead is paid once
    assert again.backward[1] == pytest.approx(small.backward[1] + small.forward[1])
    assert small.update[0] > 0


@pytest.mark.parametrize(
    ("in_flight", "reduction", "on_gpu", "on_host"),
    [
        (None, 0.0, 9, 13),  # what a run takes, which has a pair to spare
        (None, 0.2, 9, 13),
        (None, 20.0, 14, 14),  # an update that takes seven pairs
        (15, 0.0, 16, 14),  # w_0 = 14 and, on a device, two pairs
        (15, 0.2, 16, 14),
        (15, 4.0, 16, 16),
    ],
)
def test_the_cutover_of_eight_stages(in_flight, reduction, on_gpu, on_host):
    given = times(8, update=0.5, reduction=reduction)
    wide = replace(shape("pipedream_2bw", 8, 24), data_ranks=2, in_flight=in_flight)
    assert with_cutover(given, wide).cutover == on_gpu
    assert with_cutover(replace(given, on_host=True), wide).cutover == on_host


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 16), (4, 16), (8, 32)])
@pytest.mark.parametrize("reduction", [0.0, 2.0, 7.0, 11.0])  # of a pair of 3
def test_the_cutover_leaves_as_many_pairs_as_an_update_takes(stages, microbatches, reduction):
    given = times(stages, update=0.5, reduction=reduction)
    layout = with_cutover(given, replace(shape("pipedream_2bw", stages, microbatches), data_ranks=2))
    assert layout.cutover == stages - 1 + max(2, math.ceil(reduction / 3.0))
    old = replace(layout, cutover=microbatches)
    assert simulated(given, layout).seconds == pytest.approx(simulated(given, old).seconds, rel=2e-3)
    if reduction > 6.0:
        sooner = replace(layout, cutover=layout.cutover - 2)
        assert simulated(given, sooner).seconds > 1.005 * simulated(given, old).seconds

"""The planner's memory against peaks that were measured on a GPU (docs/notes/memory.md), on stages of whole layers."""

from dataclasses import replace

import pytest

from slipstream.models.cut import Layers
from slipstream.models.sizes import preset
from slipstream.pipeline import ties
from slipstream.plan.candidates import TIE_BLOCKS, Fitter
from slipstream.plan.devices import GIB, Cluster, find_device
from slipstream.plan.layout import Job
from slipstream.plan.memory import BF16, NARROW
from slipstream.plan.throughput import Shape

ROWS, SEQUENCE, MICROBATCHES = 4, 1024, 8


def fitter(data_ranks=1, model="smollm2-135m", precision=BF16):
    job = preset(model), Cluster(find_device("h200"), 4 * data_ranks)
    tokens = data_ranks * MICROBATCHES * ROWS * SEQUENCE
    return Fitter(Job(*job, tokens, SEQUENCE, optimizer="muon", precision=precision))


@pytest.mark.parametrize(
    ("schedule", "in_flight", "measured"),
    [
        ("1f1b", None, [4330717696, 3043008512, 2476533760, 2609245696]),
        ("pipedream_2bw", 9, [8492431360, 6371864064, 4442515968, 2916575744]),
    ],
)
def test_every_stage_is_within_five_percent_of_its_peak(schedule, in_flight, measured):
    """One H200, torch 2.11: what torch had allocated at most on each of four stages."""
    shape = Shape(schedule, 4, 1, MICROBATCHES, ROWS, in_flight=in_flight)
    planner = fitter()
    cut = planner.cut(shape, whole_layers=True)
    assert cut is not None
    planned = [rank.total - rank.communicators for rank in planner.memory(shape, cut)]
    assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("model", "data_ranks", "measured"),
    [
        ("smollm2-360m", 1, [8494316032, 6156720128, 4604367872, 3773033984]),
        ("smollm2-135m", 2, [4079513600, 2912488448, 2338278400, 2418824704]),
        ("smollm2-360m", 2, [7929615360, 5812760576, 4255730688, 3376290816]),
    ],
)
def test_other_models_and_a_sharded_optimizer(model, data_ranks, measured):
    """1F1B as `studies/memory.py` ran it, over NCCL; with two data ranks each has the state of half of the matrices."""
    shape = Shape("1f1b", 4, data_ranks, MICROBATCHES, ROWS, shard_optimizer=data_ranks > 1)
    planner = fitter(data_ranks, model)
    cut = planner.cut(shape, whole_layers=True)
    assert cut is not None
    planned = [rank.total - rank.communicators for rank in planner.memory(shape, cut)]
    assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("model", "data_ranks", "cutover", "measured"),
    [
        (
            "smollm2-135m",
            1,
            None,
            [4519237632, 3127570944, 2581454336],
        ),  # with a copy on the last stage that is gone
        ("smollm2-135m", 1, 8, [4639614976, 3194306048, 2649464832]),
        ("smollm2-360m", 1, None, [8988652544, 6484433408, 4938798592, 4166242304]),
        ("smollm2-135m", 2, None, [4228347392, 2984644096, 2410506240, 2622771712]),
        ("smollm2-360m", 2, None, [8308661248, 6027591680, 4483177472, 3671874560]),
    ],
)
def test_2bw_with_a_cutover_and_a_sharded_optimizer(model, data_ranks, cutover, measured):
    """`studies/memory.py` over NCCL."""
    sharded = data_ranks > 1
    shape = Shape(
        "pipedream_2bw", 4, data_ranks, MICROBATCHES, ROWS, shard_optimizer=sharded, cutover=cutover
    )
    planner = fitter(data_ranks, model)
    cut = planner.cut(shape, whole_layers=True)
    assert cut is not None
    planned = [rank.total - rank.communicators for rank in planner.memory(shape, cut)]
    assert planned[: len(measured)] == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("schedule", "model", "data_ranks", "measured"),
    [
        ("pipedream_2bw", "smollm2-360m", 1, [8287895552, 5973818880, 4402035200, 3688466432]),
        ("pipedream_2bw", "smollm2-135m", 1, [4223912448, 2951963648, 2380307456, 2576564736]),
        ("pipedream_2bw", "smollm2-360m", 2, [7980540928, 5788963840, 4219170816, 3483392512]),
        ("pipedream_2bw", "smollm2-135m", 2, [4109084672, 2894173184, 2313468928, 2498306048]),
        ("1f1b", "smollm2-360m", 1, [8311478784, 5985982464, 4433359872, 3678841344]),
    ],
)
def test_narrow_sums_and_momentum(schedule, model, data_ranks, measured):
    """`studies/memory.py` over NCCL; 1F1B has narrow momentum only."""
    precision = NARROW if schedule == "pipedream_2bw" else replace(NARROW, gradient=BF16.gradient)
    shape = Shape(schedule, 4, data_ranks, MICROBATCHES, ROWS, shard_optimizer=data_ranks > 1)
    planner = fitter(data_ranks, model, precision)
    cut = planner.cut(shape, whole_layers=True)
    assert cut is not None
    planned = [rank.total - rank.communicators for rank in planner.memory(shape, cut)]
    assert planned == pytest.approx(measured, rel=0.05)


def test_the_ten_billion_parameters_too():
    """docs/results/moe-10b.md, sums of gradients and momentum in bf16."""
    config = replace(preset("moe-10b"), vocab=49152)
    job = Job(config, Cluster(find_device("h200"), 4), 8 * 1024, 1024, optimizer="muon", precision=NARROW)
    shape = Shape("pipedream_2bw", 4, 1, MICROBATCHES, 1, checkpointing=True)
    cut = (Layers(0, 7), Layers(7, 14), Layers(14, 21), Layers(21, 24))
    planned = [rank.total - rank.communicators for rank in Fitter(job).memory(shape, cut)]
    assert planned == pytest.approx([38.84 * GIB, 35.66 * GIB, 35.60 * GIB, 18.95 * GIB], rel=0.05)


@pytest.mark.parametrize(("stages", "data_ranks", "links"), [(1, 1, 0), (2, 1, 2), (4, 1, 4), (4, 2, 4)])
def test_communicators_are_counted_for_links_and_for_data_ranks(stages, data_ranks, links):
    shape = Shape("pipedream_2bw", stages, data_ranks, MICROBATCHES, ROWS)
    planner = fitter(data_ranks)
    cut = planner.cut(shape, whole_layers=True)
    assert cut is not None
    device = planner.job.cluster.device
    expected = [links * device.link_bytes + (device.group_bytes if data_ranks > 1 else 0)] * stages
    if stages > 1:  # the embedding is tied to the head: the first and the last stage add up its gradients
        expected[0] += TIE_BLOCKS * device.link_bytes
        expected[-1] += TIE_BLOCKS * device.link_bytes
    assert [rank.communicators for rank in planner.memory(shape, cut)] == expected


def test_the_planner_counts_as_many_blocks_as_a_tied_weights_group_has():
    assert TIE_BLOCKS == ties.TIE_BLOCKS

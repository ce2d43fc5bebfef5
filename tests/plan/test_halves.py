"""Cuts inside a layer: its halves are the layer, and a plan cuts there where that is worth it."""

from __future__ import annotations

import json
import tomllib
from dataclasses import astuple, replace
from itertools import combinations, pairwise

import pytest

from slipstream.config import from_tree, resolve
from slipstream.models.cut import WORTH_CUTTING_A_LAYER, Layers, at_half, split
from slipstream.models.sizes import PRESETS, layer_cost, preset
from slipstream.models.stages import build_stage
from slipstream.plan.candidates import BLOCKS_BYTES, Fitter, shapes
from slipstream.plan.devices import Cluster, find_device
from slipstream.plan.layout import Job
from slipstream.plan.memory import BF16, FP32
from slipstream.plan.parts import Timing, build_model, stage_parts, stage_seconds
from slipstream.plan.planner import plan
from slipstream.plan.throughput import Shape, rank_sums
from slipstream.plan.written import to_json, to_toml

DEVICE = find_device("h100")
SEQUENCE = 2048
MEASURED = {"layer": Timing(3e-5, 2e-3, 5e-5, 5e-3, update=7e-4)}


def fitter(config, devices=4, **changes):
    cluster = Cluster(replace(DEVICE, **changes), devices)
    return Fitter(Job(config, cluster, 64 * SEQUENCE, SEQUENCE))


def shape(schedule="1f1b", stages=4, **rest):
    return Shape(schedule, stages, 1, 64, 1, **rest)


def seconds(found, cut, one):
    return [
        sum(stage_seconds(stage_parts(found.model, part), one.microbatch_size, one.checkpointing))
        for part in cut
    ]


def every_cut(layers, stages, step):
    """At layers (step 2), or at halves of them."""
    inner = range(step, 2 * layers, step)
    for edges in combinations(inner, stages - 1):
        yield tuple(Layers(at_half(a), at_half(b)) for a, b in pairwise([0, *edges, 2 * layers]))


@pytest.mark.parametrize("timings", [None, MEASURED], ids=["shapes", "profile"])
@pytest.mark.parametrize("precision", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", PRESETS)
def test_the_halves_of_a_layer_add_up_to_it(name, precision, timings):
    config = preset(name)
    model = build_model(config, SEQUENCE, DEVICE, precision, timings)
    (attention, mlp), layer = model.halves, model.layers[0]
    for field in ("matrices", "others", "activation_bytes", "working_bytes", "update_flops"):
        assert getattr(attention, field) + getattr(mlp, field) == getattr(layer, field)
        assert min(getattr(attention, field), getattr(mlp, field)) > 0
    times = [[value or 0.0 for value in astuple(part.timing)] for part in (attention, mlp, layer)]
    assert [a + b for a, b in zip(*times[:2], strict=True)] == pytest.approx(times[2], rel=1e-12)
    assert layer.timing == (timings or {}).get("layer", layer.timing)
    assert layer.parameters == layer_cost(config, SEQUENCE).parameters
    assert max(attention.largest, mlp.largest) == layer.largest
    # One after the other: the MLP's backward, and when what it kept has gone the attention's.
    assert max(mlp.backward_bytes, attention.backward_bytes - mlp.activation_bytes) == layer.backward_bytes
    # A half keeps its own input, a layer the attention's.
    hidden = precision.activation * config.dim * SEQUENCE
    assert attention.checkpointed_bytes == mlp.checkpointed_bytes == layer.checkpointed_bytes == hidden


@pytest.mark.parametrize("name", PRESETS)
def test_halves_have_the_parameters_of_the_stages_that_are_built(name):
    config = preset(name)
    model = build_model(config, SEQUENCE, DEVICE, BF16)
    for half, edges in zip(model.halves, [(1, 1.5), (1.5, 2)], strict=True):
        stage = build_stage(config, *edges, embedding=False, head=False, seed=0, device="meta")
        sizes = [(parameter.ndim > 1, parameter.numel()) for parameter in stage.parameters()]
        assert half.matrices == sum(size for matrix, size in sizes if matrix)
        assert half.others == sum(size for matrix, size in sizes if not matrix)
        assert half.largest == max(size for _, size in sizes)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama-42m", "moe-94m", "qwen3-0.6b"])
def test_stages_that_share_a_layer_have_its_time_and_memory_between_them(name, checkpointing):
    """But for one hidden state more, where only inputs are kept: the MLP's, which a whole layer computes again."""
    found = fitter(preset(name))
    one = shape(checkpointing=checkpointing)
    whole, parts = [Layers(2, 6)], [Layers(2, 3.5), Layers(3.5, 6)]
    assert sum(seconds(found, parts, one)) == pytest.approx(seconds(found, whole, one)[0], rel=1e-12)
    held = sum(found._held(part, one) for part in parts) - found._held(whole[0], one)
    assert held == (found.model.boundary_bytes if checkpointing else 0)
    assert found._held(Layers(1, 2), one) > BLOCKS_BYTES


def test_a_stage_has_the_parts_that_lie_in_it():
    model = build_model(preset("llama-42m"), SEQUENCE, DEVICE, BF16)
    attention, mlp = model.halves
    layer = model.layers[0]
    assert stage_parts(model, Layers(0, 0.5)) == [model.embedding, attention]
    assert stage_parts(model, Layers(0.5, 1)) == [mlp]
    assert stage_parts(model, Layers(1.5, 3.5)) == [mlp, layer, attention]
    assert stage_parts(model, Layers(1.5, 2.5)) == [mlp, attention]
    assert stage_parts(model, Layers(6.5, 8)) == [mlp, layer, model.head]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["llama-42m", "moe-94m", "llama3-8b"])
def test_a_layer_is_cut_where_that_takes_two_percent_off_the_slowest_stage(name, stages, checkpointing):
    config = replace(preset(name), layers=5)
    found = fitter(config, stages)
    one = shape("pipedream_2bw", stages, checkpointing=checkpointing)

    def slowest(cut):
        return max(seconds(found, cut, one))

    cut, whole = found.cut(one), found.cut(one, whole_layers=True)
    by_layer, by_half = (min(map(slowest, every_cut(5, stages, step))) for step in (2, 1))
    assert slowest(whole) == pytest.approx(by_layer)
    best = by_half if by_half <= (1 - WORTH_CUTTING_A_LAYER) * by_layer else by_layer
    assert slowest(cut) == pytest.approx(best)
    assert cut == whole or best < by_layer
    assert all(isinstance(edge, int) or edge % 1 == 0.5 for part in cut for edge in part)


@pytest.mark.parametrize("name", ["llama-8m", "llama-42m", "moe-94m", "smollm2-360m", "qwen3-4b"])
@pytest.mark.parametrize("stages", [2, 4, 6])
def test_by_flops_alone_it_is_as_good_as_the_trainers_own_cut(name, stages):
    config = preset(name)
    found = fitter(config, stages, layer_overhead=0.0)
    one = shape("1f1b", stages)
    own = split(config, stages, sequence=SEQUENCE)
    planned = found.cut(one)
    assert max(seconds(found, planned, one)) == pytest.approx(max(seconds(found, own, one)))
    assert any(part.start % 1 for part in planned) == any(part.start % 1 for part in own)


@pytest.mark.parametrize("schedule", ["pipedream_2bw", "1f1b"])
@pytest.mark.parametrize("share", [0.94, 0.97, 0.99])
@pytest.mark.parametrize("name", ["llama-42m", "moe-94m"])
def test_among_the_cuts_that_fit_the_best_is_taken(name, share, schedule):
    """By brute force, with less room than the balanced cut needs."""
    config = replace(preset(name), layers=6)
    found = fitter(config, 3)
    one = Shape(schedule, 3, 1, 16, 4)
    balanced = found.cut(one)
    room = share * max(rank.total for rank in found.memory(one, balanced))

    def slowest(cut):
        return max(seconds(found, cut, one))

    fitting = {
        step: [
            slowest(cut)
            for cut in every_cut(6, 3, step)
            if max(rank.total for rank in found.memory(one, cut)) <= room
        ]
        for step in (1, 2)
    }
    entry = found.fit(one, room)
    if not fitting[1]:
        assert entry is None
        return
    assert entry is not None
    by_layer, by_half = min(fitting[2], default=float("inf")), min(fitting[1])
    best = by_half if by_half <= (1 - WORTH_CUTTING_A_LAYER) * by_layer else by_layer
    assert slowest(entry[0]) == pytest.approx(best)
    assert max(rank.total for rank in entry[1]) <= room


@pytest.mark.parametrize("schedule", ["pipedream_2bw", "1f1b", "gpipe", "zb_h1"])
def test_all_schedules_are_cut_alike(schedule):
    """Also those that the trainer does not run: a rival must not lose by its cut."""
    found = fitter(preset("llama-42m"))
    assert any(part.start % 1 for part in found.cut(shape(schedule)))
    assert found.cut(shape(schedule)) == found.cut(shape("1f1b"))


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("name", ["llama-42m", "smollm2-360m", "qwen3-4b", "llama3-8b"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_with_two_chunks_the_slowest_rank_gains(name, stages, schedule):
    found = fitter(preset(name), stages)
    one = shape(schedule, stages)
    cut, whole = found.cut(one), found.cut(one, whole_layers=True)
    if cut != whole:
        slowest, by_layer = (max(rank_sums(seconds(found, each, one), one)) for each in (cut, whole))
        assert slowest <= (1 - WORTH_CUTTING_A_LAYER) * by_layer * (1 + 1e-12)


def test_what_fits_with_whole_layers_is_not_lost():
    """Chunks are not cut again by memory: where those with half layers do not fit, whole ones may."""
    found = fitter(preset("llama-42m"), 2)
    for one in (shape("zbv", 2), shape("interleaved_1f1b", 2), shape("zbv", 2, checkpointing=True)):
        whole = found.cut(one, whole_layers=True)
        room = max(rank.total for rank in found.memory(one, whole))
        assert found.fit(one, room) is not None


def test_a_plan_with_half_layers_is_a_run_that_train_accepts():
    result = plan(Job(preset("llama-42m"), Cluster(DEVICE, 4), 64 * 1024, 1024, stages=4))
    halves = 0
    for layout in result.layouts:
        assert layout.cut[0].start == 0
        assert layout.cut[-1].stop == 8
        assert all(a.stop == b.start and a.start < b.start for a, b in pairwise(layout.cut))
        text = to_toml(result, layout, "llama-42m")
        if text is None:
            continue
        boundaries = resolve(from_tree(tomllib.loads(text))).pipeline.boundaries
        assert boundaries == [part.start for part in layout.cut[1:]]
        halves += any(edge % 1 for edge in boundaries)
    assert halves
    told = json.loads(json.dumps(to_json(result, "llama-42m")))["layouts"]
    assert [one["boundaries"] for one in told] == [
        [part.start for part in layout.cut[1:]] for layout in result.layouts
    ]


def test_every_shape_has_a_cut_of_all_layers():
    job = Job(preset("smollm2-135m"), Cluster(DEVICE, 12), 96 * 1024, 1024)
    found = Fitter(job)
    for one in shapes(job):
        cut = found.cut(one)
        assert cut is not None
        edges = [0, *(part.stop for part in cut)]
        assert edges[-1] == 30
        assert [Layers(*edge) for edge in pairwise(edges)] == list(cut)
        assert len(cut) == one.model_stages

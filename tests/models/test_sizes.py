"""Counts against the modules themselves: parameters on the meta device, FLOPs by torch's counter."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from slipstream.errors import ConfigError, UserError
from slipstream.models import sizes
from slipstream.models.sizes import PRESETS, ModelConfig, preset
from slipstream.models.stages import build_model, measured_cut, split

TINY = ModelConfig(vocab=64, dim=32, layers=3, heads=4, kv_heads=2, ffn=48, tied=False)
ROUTED = replace(TINY, experts=4, experts_per_token=2)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("change", [{}, {"qk_norm": True}, {"tied": None}])
def test_parameter_counts_are_those_of_the_module(name, change):
    change = {"tied": not PRESETS[name].tied} if "tied" in change else change
    config = preset(name, **change)
    model = build_model(config, 0, "meta")
    assert sizes.parameters(config) == sum(parameter.numel() for parameter in model.parameters())


def test_published_shapes_have_their_published_size():
    published = {"smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384}
    assert {name: sizes.parameters(PRESETS[name]) for name in published} == published
    assert 41e6 < sizes.parameters(PRESETS["llama-42m"]) < 43e6
    assert 9.5e9 < sizes.parameters(PRESETS["moe-10b"]) < 10.5e9


def grouped_flops(a_shape, b_shape, *_, out_shape=None, **__):
    return 2 * a_shape[0] * b_shape[-2] * b_shape[-1]


def counted_forward_flops(config: ModelConfig, sequence: int) -> int:
    """By torch. Its counter takes attention over all T keys, we take the (T + 1) / 2 a causal mask leaves."""
    model = build_model(config, 0, "meta").bfloat16()  # the grouped product has no other type there
    tokens = torch.zeros(1, sequence, dtype=torch.long, device="meta")
    mapping = {torch.ops.aten._grouped_mm: grouped_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter, torch.no_grad():
        model(tokens)
    full_attention = config.layers * 4 * sequence * sequence * config.q_dim
    causal_attention = config.layers * 2 * sequence * (sequence + 1) * config.q_dim
    return counter.get_total_flops() - full_attention + causal_attention


@pytest.mark.parametrize("config", [TINY, ROUTED, *(replace(shape, layers=2) for shape in PRESETS.values())])
def test_flops_are_those_the_forward_runs(config):
    sequence = 40
    assert counted_forward_flops(config, sequence) == sequence * sizes.forward_flops_per_token(
        config, sequence
    )
    assert sizes.flops_per_token(config, sequence) == 3 * sizes.forward_flops_per_token(config, sequence)


@pytest.mark.parametrize("config", [TINY, ROUTED, replace(TINY, qk_norm=True), PRESETS["cpu-default"]])
def test_activation_counts_are_near_what_autograd_keeps(config):
    """Within 4 %: the count leaves out small vectors (norm scales, softmax sums, rotary angles)."""
    sequence = 32
    model = build_model(config, 0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights and tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.zeros(1, sequence, dtype=torch.long))
    measured = sum(kept.values()) / sequence
    layers = config.layers * sizes.layer_cost(config, sequence).activation_bytes(4)
    # The head's logits are kept by the loss, which is not run here.
    predicted = layers + sizes.head_cost(config).activation_bytes(4) - 4 * output.shape[-1]
    assert predicted == pytest.approx(measured, rel=0.04)


def stage_costs(config, ranges, sequence):
    layer = sizes.layer_cost(config, sequence).forward_flops
    costs = [layer * len(part) for part in ranges]
    costs[-1] += sizes.head_cost(config).forward_flops
    return costs


@settings(max_examples=60, deadline=None)
@given(layers=st.integers(1, 9), stages=st.integers(1, 9), vocab=st.sampled_from([8, 500, 5000]))
def test_split_is_the_best_contiguous_one(layers, stages, vocab):
    config = replace(TINY, layers=layers, vocab=vocab)
    if stages > layers:
        with pytest.raises(UserError, match="stages"):
            split(config, stages)
        return
    ranges = split(config, stages, sequence=64)
    assert [i for part in ranges for i in part] == list(range(layers))
    assert all(len(part) >= 1 for part in ranges)
    best = min(
        max(stage_costs(config, split(config, stages, boundaries), 64))
        for boundaries in combinations(range(1, layers), stages - 1)
    )
    assert max(stage_costs(config, ranges, 64)) == best


@settings(max_examples=100, deadline=None)
@given(data=st.data(), layers=st.integers(2, 9), layer=st.sampled_from([0.5, 1.0, 3.0]))
def test_a_cut_by_measured_times_is_the_best_contiguous_one(data, layers, layer):
    """Of times that are so much a layer, an embedding and a head: found again from the times alone."""
    stages = data.draw(st.integers(2, min(5, layers)))
    head = data.draw(st.sampled_from([0.0, 0.25, 2.0, 7.5]))
    embedding = data.draw(st.sampled_from([0.0, 0.25, 1.5])) if stages > 2 else 0.0
    every = [
        [range(a, b) for a, b in pairwise([0, *edges, layers])]
        for edges in combinations(range(1, layers), stages - 1)
    ]

    def times(cut):
        found = [layer * len(part) for part in cut]
        found[0] += embedding
        found[-1] += head
        return found

    now = data.draw(st.sampled_from(every))
    boundaries, left = measured_cut(times(now), now)
    found = [range(a, b) for a, b in pairwise([0, *boundaries, layers])]
    best = min(max(times(cut)) for cut in every)
    assert max(times(found)) == pytest.approx(best)
    assert left == pytest.approx(best / max(times(now)))
    if max(times(now)) == best:
        assert found == now


def test_one_stage_has_no_cut():
    assert measured_cut([3.0], [range(4)]) == ([], 1.0)


def test_wrong_boundaries_and_shapes_say_what_to_change():
    assert split(TINY, 2, [1]) == [range(1), range(1, 3)]
    for boundaries in ([], [0], [3], [1, 2], [2, 1]):
        with pytest.raises(UserError, match="boundaries"):
            split(TINY, 2, boundaries)
    with pytest.raises(ConfigError) as caught:
        ModelConfig(vocab=9, dim=30, layers=1, heads=4, kv_heads=3, ffn=8, experts=2, experts_per_token=3)
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError, match="no effect"):
        replace(TINY, experts_per_token=2)
    with pytest.raises(UserError, match="smollm2-360m"):
        preset("smollm-360m")


def test_sizes_need_no_torch():
    code = "import sys, slipstream.models.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "billions"),  # as the authors give them
    [("llama3-8b", 8.03), ("llama3-70b", 70.55), ("qwen3-0.6b", 0.596), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19),
     ("qwen3-32b", 32.76), ("qwen3-30b-a3b", 30.53), ("mixtral-8x7b", 46.70), ("mixtral-8x22b", 140.63)],
)  # fmt: skip
def test_published_shapes_have_the_published_size(name, billions):
    assert sizes.parameters(PRESETS[name]) / 1e9 == pytest.approx(billions, rel=2e-3)

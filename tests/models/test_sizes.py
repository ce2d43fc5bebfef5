"""Counts against the modules themselves: parameters on the meta device, FLOPs by torch's counter."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slipstream.errors import ConfigError, UserError
from slipstream.models import sizes
from slipstream.models.sizes import PRESETS, ModelConfig, preset
from slipstream.models.stages import build_model

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


def test_wrong_shapes_say_what_to_change():
    with pytest.raises(ConfigError) as caught:
        ModelConfig(vocab=9, dim=30, layers=1, heads=4, kv_heads=3, ffn=8, experts=2, experts_per_token=3)
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError, match="no effect"):
        replace(TINY, experts_per_token=2)
    with pytest.raises(UserError, match="smollm2-360m"):
        preset("smollm-360m")


def test_sizes_and_cuts_need_no_torch():
    code = "import sys, slipstream.models.cut, slipstream.models.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "billions"),  # as the authors give them
    [("llama3-8b", 8.03), ("llama3-70b", 70.55), ("qwen3-0.6b", 0.596), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19),
     ("qwen3-32b", 32.76), ("qwen3-30b-a3b", 30.53), ("mixtral-8x7b", 46.70), ("mixtral-8x22b", 140.63)],
)  # fmt: skip
def test_published_shapes_have_the_published_size(name, billions):
    assert sizes.parameters(PRESETS[name]) / 1e9 == pytest.approx(billions, rel=2e-3)

"""Where an update's time goes: laws on made-up traces, and on what torch's profiler records on a CPU."""

from __future__ import annotations

import pytest

from slipstream.metrics.breakdown import (
    ATTENTION,
    COMMUNICATION,
    EMBEDDING,
    HEAD,
    IDLE,
    MLP,
    NORMS,
    OPTIMIZER,
    PARTS,
    PRODUCTS,
    RECORDED,
    Breakdown,
    Sizes,
    breakdown,
)
from slipstream.models.sizes import PRESETS

SIZES = Sizes(vocab=4096, mlp=frozenset({384}), tokens=32)


def event(name, start, seconds, cat="cpu_op", tid=1, **args):
    args = {key.replace("_", " "): value for key, value in args.items()}
    times = {"ts": start * 1e6, "dur": seconds * 1e6}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "args": args, **times}


def of(*events, sizes=SIZES):
    found = breakdown({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}, sizes).parts
    return {part: pytest.approx(both) for part, both in found.items() if sum(both)}


@pytest.mark.parametrize(
    ("name", "dims", "part"),
    [
        ("aten::mm", [[32, 128], [128, 384]], MLP),
        (
            "aten::mm",
            [[384, 32], [32, 128], [384, 128]],
            MLP,
        ),  # the gradient of a weight, written to a third tensor
        ("aten::mm", [[32, 128], [128, 4096]], HEAD),
        ("aten::mm", [[32, 128], [128, 64]], PRODUCTS),
        ("aten::addmm", [[32, 64], [32, 128], [128, 64], [], []], PRODUCTS),
        ("aten::addmm", [[384], [32, 128], [128, 384], [], []], MLP),
        ("aten::linear", [[2, 16, 128], [384, 128], []], MLP),
        ("aten::linear", [[32, 128], [4096, 128], []], HEAD),
        ("aten::_grouped_mm", [[64, 128], [8, 128, 704]], MLP),
        ("aten::mul", [[2, 16, 384], [2, 16, 384]], MLP),
        ("aten::exp", [[32, 4096]], HEAD),
        ("aten::mul", [[2, 16, 128], [128]], NORMS),
        ("triton_poi_fused_add_3", [[32, 128], [384]], NORMS),  # a list of numbers has no width
        ("aten::embedding", [[4096, 128], [2, 16]], EMBEDDING),
        ("aten::_foreach_add_", [[[384, 128], [4096, 128]]], OPTIMIZER),
        ("anything", [], NORMS),
    ],
)
def test_names_and_shapes_tell_the_part(name, dims, part):
    assert of(event(name, 0, 2, Input_Dims=dims)) == {part: (2, 0)}


def test_as_many_tokens_as_the_mlp_is_wide_are_no_mlp():
    sizes = Sizes(vocab=4096, mlp=frozenset({384}), tokens=384)
    for dims in ([[384, 128], [128, 64]], [[64, 384], [384, 128]]):
        assert of(event("aten::mm", 0, 1, Input_Dims=dims), sizes=sizes) == {PRODUCTS: (1, 0)}
    assert of(event("aten::mm", 0, 1, Input_Dims=[[384, 384], [384, 128]]), sizes=sizes) == {MLP: (1, 0)}


def test_rows_of_experts_are_known_by_their_number():
    sizes = Sizes(vocab=4096, mlp=frozenset({704, 8}), tokens=32, routed=64)
    for name, dims in (("aten::sort", [[64]]), ("aten::index", [[64, 128]]), ("aten::topk", [[32, 8]])):
        assert of(event(name, 0, 1, Input_Dims=dims), sizes=sizes) == {MLP: (1, 0)}


def test_a_width_that_attention_has_too_does_not_tell_experts():
    """moe-10b's experts are as wide as the model: its q, k, v, o and norms were counted as theirs."""
    sizes = Sizes.of(PRESETS["moe-10b"], tokens=16)
    assert sizes.mlp == {32}
    for name, dims, part in (
        ("aten::mm", [[16, 2048], [2048, 2048]], PRODUCTS),
        ("aten::mm", [[16, 2048], [2048, 32]], MLP),  # the router
        ("aten::_grouped_mm", [[64, 2048], [32, 2048, 2048]], MLP),
        ("aten::mul", [[64, 2048], [64, 2048]], MLP),
        ("aten::mul", [[1, 16, 2048], [2048]], NORMS),
    ):
        assert of(event(name, 0, 1, Input_Dims=dims), sizes=sizes) == {part: (1, 0)}
    assert Sizes.of(PRESETS["smollm2-360m"], tokens=16).mlp == {2560}


def test_on_a_cpu_an_operation_has_the_time_its_callees_leave_and_the_rest_is_idle():
    assert of(
        event("aten::scaled_dot_product_attention", 0, 4),
        event("aten::bmm", 1, 2, Input_Dims=[[4, 16, 32], [4, 32, 16]]),
        event("autograd::engine::evaluate_function: MmBackward0", 5, 3),
        event("aten::mm", 6, 1, Input_Dims=[[32, 128], [128, 384]]),
        event("slipstream: update", 9, 1, cat="user_annotation"),
        event("aten::_foreach_add_", 9.25, 0.5, Input_Dims=[[[4096, 128]]]),
        event("aten::copy_", 0, 2, tid=2),  # a thread that reads ahead
    ) == {ATTENTION: (4, 0), NORMS: (0, 2), MLP: (0, 1), OPTIMIZER: (1, 0), IDLE: (2, 0)}


def test_on_a_gpu_kernels_count_and_their_launches_tell_the_part():
    assert of(
        event("aten::mm", 0, 1, Input_Dims=[[32, 128], [128, 4096]]),
        event("cudaLaunchKernel", 0.5, 0.1, cat="cuda_runtime", correlation=1),
        event("nvjet_hsh_128x256", 10, 4, cat="kernel", tid=7, correlation=1),
        event("autograd::engine::evaluate_function: CompiledFunctionBackward", 1, 2, tid=2),
        event("triton_poi_fused_silu_backward_1", 1.5, 1, tid=2, Input_Dims=[[32, 384]]),
        event("cuLaunchKernel", 2, 0.1, cat="cuda_driver", tid=2, correlation=2),
        event("triton_poi_fused_silu_backward_1", 15, 2, cat="kernel", tid=7, correlation=2),
        event(
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 17, 1, cat="kernel", tid=7, correlation=99
        ),
    ) == {HEAD: (4, 0), MLP: (0, 2), ATTENTION: (1, 0), IDLE: (1, 0)}


def test_of_a_recorded_stage_only_what_kernels_are_called_tells_the_part():
    """One launch stands for all: no operation, and no shape, is around a kernel of its own."""
    backward = event("autograd::engine::evaluate_function: _ReplayedBackward", 5, 1, tid=2)
    assert of(
        event("_Replayed", 0, 1, Input_Dims=[[32, 128], [4096, 128]]),
        event("cudaGraphLaunch", 0.5, 0.1, cat="cuda_runtime", correlation=1),
        event("nvjet_hsh_128x256", 10, 4, cat="kernel", tid=7, correlation=1),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 14, 1, cat="kernel", tid=7, correlation=1),
        backward,
        event("cudaGraphLaunch", 5.5, 0.1, cat="cuda_runtime", tid=2, correlation=2),
        event("triton_red_fused_add_mul_sum", 15, 2, cat="kernel", tid=7, correlation=2),
        event("cudaGraphLaunch", 8, 0.1, cat="cuda_runtime", tid=3, correlation=3),  # by no operation
        event("nvjet_hsh_128x256", 17, 3, cat="kernel", tid=7, correlation=3),
    ) == {RECORDED: (7, 2), ATTENTION: (1, 0)}


def test_what_runs_at_once_counts_once_and_communication_last():
    assert of(
        event("aten::add", 0, 9, Input_Dims=[[32, 128]]),
        event("cudaLaunchKernel", 0, 0.1, cat="cuda_runtime", correlation=1),
        event("ncclDevKernel_SendRecv", 0, 10, cat="kernel", tid=8),
        event("elementwise", 2, 4, cat="kernel", tid=7, correlation=1),
        event("elementwise", 4, 4, cat="kernel", tid=9, correlation=1),
        event("Memcpy PtoP", 9, 2, cat="gpu_memcpy", tid=9),
    ) == {NORMS: (6, 0), COMMUNICATION: (5, 0)}


def test_the_parts_make_up_the_span_and_an_update_its_time():
    found = Breakdown(dict.fromkeys(PARTS, (0.25, 0.5)))
    assert found.span == pytest.approx(0.75 * len(PARTS))
    assert found.per_update(3).span == pytest.approx(0.25 * len(PARTS))
    unrecorded = found.per_update(3, seconds=2.5)
    assert unrecorded.span == pytest.approx(2.5)
    assert unrecorded.parts[IDLE] == pytest.approx((2.5 - 0.25 * (len(PARTS) - 1), 0))
    assert found.per_update(3, seconds=1.0).parts[IDLE] == (0, 0)  # no less than nothing


def test_the_picture_has_a_bar_for_every_part_and_the_longest_is_full():
    lines = Breakdown({ATTENTION: (0.010, 0.030), HEAD: (0.010, 0.0), IDLE: (0.0, 0.0)}).lines()
    assert lines[1].endswith("80.0%  " + "█" * 10 + "▒" * 30)
    assert lines[2].endswith("20.0%  " + "█" * 10)
    assert "█" not in lines[3]
    assert "50.0 ms" in lines[4]


def test_nothing_recorded_is_nothing():
    found = breakdown({"traceEvents": []}, SIZES)
    assert set(found.parts) == set(PARTS) - {RECORDED}
    assert found.span == 0
    assert found.lines()

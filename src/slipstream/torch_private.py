"""Every private torch name this package uses, in one place; a test lists them and fails on any other.

Torch's horizontally fused list operations (`torch._foreach_*`) have no public spelling. They are what the
optimizers of torch itself are made of, and they are called here on lists of plain local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from slipstream.torch_late import imported, is_fsdp

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

Tensors = Sequence[Tensor]


def copy_(targets: Tensors, sources: Tensors) -> None:
    """targets ← sources, dtypes may differ."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def zero_(targets: Tensors) -> None:
    """targets ← 0."""
    if targets:
        torch._foreach_zero_(list(targets))


def lerp_(starts: Tensors, ends: Tensors, weight: float) -> None:
    """starts ← starts + weight (ends - starts)."""
    if starts:
        torch._foreach_lerp_(list(starts), list(ends), weight)


def add_(targets: Tensors, others: Tensors, alpha: float = 1.0) -> None:
    """targets ← targets + alpha others."""
    if targets:
        torch._foreach_add_(list(targets), list(others), alpha=alpha)


def mul_(targets: Tensors, factor: float | Tensor | Tensors) -> None:
    """targets ← targets * factor."""
    if targets:
        torch._foreach_mul_(list(targets), factor)  # pyrefly: ignore[no-matching-overload]


def norms(tensors: Tensors) -> list[Tensor]:
    """The Euclidean norm of each tensor."""
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors):
        return list(torch._foreach_norm(list(tensors), dtype=torch.float32))
    return list(torch._foreach_norm(list(tensors))) if tensors else []


def count_groups_anew() -> None:
    """torch calls a group by how many this process has made since it last destroyed the default one. A group whose
    making fails counts as well, on the ranks that had come that far; ranks that call a group differently never meet."""
    dist.distributed_c10d._world.group_count = 0


def run_grad_hooks(parameter: Tensor) -> None:
    """Tell whoever is told when autograd has added to its gradient."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # pyrefly: ignore[missing-attribute]
        hook(parameter)


def has_grad_hooks(parameter: Tensor) -> bool:
    """Whether anyone changes this parameter's gradient, or is told of it."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # pyrefly: ignore[missing-attribute]


def traced_graph(stage: Any) -> tuple[Any, Any, dict[str, int]]:
    """(outer graph node, outer graph, submodule name -> stage) of a stage made by torch's pipeline tracer."""
    return stage.node, stage.pipe_info.graph, stage.submod_to_stage_index


def is_traced(stage: Any) -> bool:
    """Whether `stage` comes from torch's tracer (`pipeline(...).build_stage`)."""
    if not imported("torch.distributed.pipelining"):
        return False
    from torch.distributed.pipelining.stage import _PipelineStage

    return isinstance(stage, _PipelineStage)


def is_pipeline_stage(stage: Any) -> bool:
    if not imported("torch.distributed.pipelining"):
        return False
    from torch.distributed.pipelining.stage import _PipelineStageBase

    return isinstance(stage, _PipelineStageBase)


def default_store() -> dist.Store:
    """The store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


def fsdp_meshes(module: nn.Module) -> dict[int, DeviceMesh]:
    """The mesh over which FSDP2 averages the gradient of a parameter, by the parameter's id."""
    found: dict[int, DeviceMesh] = {}
    for fsdp_module in module.modules():
        if is_fsdp(fsdp_module):
            fsdp_state: Any = fsdp_module._get_fsdp_state()
            if hasattr(fsdp_state, "_fsdp_param_groups"):
                groups = fsdp_state._fsdp_param_groups
            else:  # up to torch 2.11 a module had one at most
                groups = [group] if (group := fsdp_state._fsdp_param_group) is not None else []
            for group in groups:
                for parameter in group.fsdp_params:
                    found[id(parameter.sharded_param)] = parameter.mesh_info.mesh
    return found


def is_replicate_spec(spec: object) -> bool:
    """Whether a chunk spec of torch's says that every microbatch gets the whole tensor."""
    if not imported("torch.distributed.pipelining"):
        return False
    from torch.distributed.pipelining.microbatch import _Replicate

    return spec is _Replicate or isinstance(spec, _Replicate)


def is_strided_shard(placement: object) -> bool:
    """Whether FSDP2 cut what tensor parallelism had cut along the same dimension before."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def spare_compiler() -> None:
    """For a process that compiles nothing. An optimizer that is made imports torch's compiler, which takes two seconds,
    to tell it that it should not look into three of an optimizer's methods."""
    if imported("torch._dynamo"):
        return
    for method in (Optimizer.add_param_group, Optimizer.state_dict, Optimizer.load_state_dict):
        plain = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dynamo_disable = plain  # what torch would keep there


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell LR schedulers that the optimizer has stepped: a pipeline stage's first update comes a call later."""
    optimizer._opt_called = True  # pyrefly: ignore[missing-attribute]


def run_step_hooks(optimizer: Optimizer, before: bool) -> None:
    """Call what `register_step_pre_hook` or `register_step_post_hook` left, for a step that is not taken by `step`."""
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    shared = _global_optimizer_pre_hooks if before else _global_optimizer_post_hooks
    own = optimizer._optimizer_step_pre_hooks if before else optimizer._optimizer_step_post_hooks
    for hook in (*own.values(), *shared.values()):
        hook(optimizer, (), {})


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether anyone listens to this optimizer's steps."""
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def updating() -> AbstractContextManager[object]:
    """What runs inside is the update's, to a profiler that is recording; where none is, this costs nothing."""
    recording = torch.autograd.profiler._is_profiler_enabled
    return torch.profiler.record_function("slipstream: update") if recording else nullcontext()


def serve_with(group: dist.ProcessGroup, gloo: dist.ProcessGroupGloo) -> None:
    """Let a group written in Python hand to `gloo` whatever it does not do itself."""
    kind = dist.ProcessGroup.BackendType.GLOO
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, gloo)
    group._set_default_backend(kind)

"""Every private torch name this package uses, in one place; a test lists them and fails on any other.

Torch's horizontally fused list operations (`torch._foreach_*`) have no public spelling. They are what the
optimizers of torch itself are made of, and they are called here on lists of plain local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["tree_leaves", "tree_map"]

Tensors = Sequence[Tensor]


def copy_(targets: Tensors, sources: Tensors) -> None:
    """targets ← sources, dtypes may differ."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


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
        torch._foreach_mul_(list(targets), factor)  # pyright: ignore[reportArgumentType, reportCallIssue]


def norms(tensors: Tensors) -> list[Tensor]:
    """The Euclidean norm of each tensor."""
    return list(torch._foreach_norm(list(tensors))) if tensors else []


def traced_graph(stage: Any) -> tuple[Any, Any, dict[str, int]]:
    """(outer graph node, outer graph, submodule name -> stage) of a stage made by torch's pipeline tracer."""
    return stage.node, stage.pipe_info.graph, stage.submod_to_stage_index


def is_traced(stage: Any) -> bool:
    """Whether `stage` comes from torch's tracer (`pipeline(...).build_stage`)."""
    from torch.distributed.pipelining.stage import _PipelineStage

    return isinstance(stage, _PipelineStage)


def is_pipeline_stage(stage: Any) -> bool:
    from torch.distributed.pipelining.stage import _PipelineStageBase

    return isinstance(stage, _PipelineStageBase)


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell LR schedulers that the optimizer has stepped: a pipeline stage's first update comes a call later."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]


def serve_with(group: dist.ProcessGroup, gloo: dist.ProcessGroupGloo) -> None:
    """Let a group written in Python hand to `gloo` whatever it does not do itself."""
    kind = dist.ProcessGroup.BackendType.GLOO
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, gloo)
    group._set_default_backend(kind)

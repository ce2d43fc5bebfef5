"""What `Schedule2BW` and `Emulator` are both told, checked once: how a group is cut, its loss, update and banks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.errors import UserError
from slipstream.optim.corrections import Correction
from slipstream.pipeline.checks import NO_FACTORY
from slipstream.pipeline.microbatches import ChunkSpec, Microbatch, presplit, split
from slipstream.pipeline.replica import Prepare

OptimizerFactory = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True)
class Options:
    """`last`, `stages`: of the pipeline this process is a part of."""

    n_microbatches: int
    loss_fn: Callable[..., Tensor] | None
    optimizer: OptimizerFactory | None
    correction: str | Correction
    max_grad_norm: float | None
    synchronous: int | Callable[[int], bool] = 0
    bank_dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None  # of a group's sums; None: the master's
    prepare: Prepare | None = None
    replicas: Sequence[nn.Module] | None = None
    scale_grads: bool = True
    data_reduction: str = "mean"
    args_chunk_spec: Sequence[ChunkSpec] | None = None
    kwargs_chunk_spec: Mapping[str, ChunkSpec] | None = None
    last: bool = True
    stages: int = 1

    def __post_init__(self) -> None:
        optimizer, most, count = self.optimizer, self.max_grad_norm, self.n_microbatches
        if not callable(optimizer) or isinstance(optimizer, Optimizer):
            raise UserError(NO_FACTORY)
        if self.last and self.loss_fn is None:
            raise UserError("The last stage needs loss_fn(output, target).")
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise UserError(f"loss_fn={self.loss_fn!r}: give a function of (output, target).")
        if most is not None and not (isinstance(most, Real | Tensor) and most > 0):
            raise UserError(f"max_grad_norm={most!r}: give a norm above 0, or None for no clipping.")
        if not isinstance(count, int) or count < 1:
            raise UserError(f"n_microbatches is {count}; it must be a whole number of at least 1.")
        if count < self.stages:
            raise UserError(
                f"2BW needs at least as many microbatches as stages: n_microbatches={count} < {self.stages} stages. "
                f"Set n_microbatches to {self.stages} or more, or use fewer stages."
            )
        for name, dtype in (("bank_dtype", self.bank_dtype), ("gradient_dtype", self.gradient_dtype)):
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise UserError(f"{name}={dtype!r}: give a dtype of torch, torch.bfloat16 for one, or None.")
        if self.bank_dtype == torch.float16:
            raise _half("bank_dtype=torch.float16")
        if (
            self.gradient_dtype is not None
            and (self.gradient_dtype, self.bank_dtype) != (torch.bfloat16,) * 2
        ):
            raise UserError(
                f"gradient_dtype={self.gradient_dtype} with bank_dtype={self.bank_dtype}: sums are kept in the "
                "master's dtype (None) or, with bfloat16 banks, in bfloat16, rounded at random."
            )
        if self.data_reduction not in ("mean", "sum"):
            raise UserError(
                f"data_reduction={self.data_reduction!r}: gradients over data ranks are a 'mean' or a 'sum'."
            )
        if self.replicas is not None and self.prepare is not None:
            raise UserError("Give replicas that are ready, or prepare, not both: prepare would be left out.")

    @property
    def flushed(self) -> Callable[[int], bool]:
        """`synchronous=N` flushes the first N groups; a callable says so for any group."""
        first = self.synchronous
        if callable(first):
            return first
        if not isinstance(first, Integral) or first < 0:
            raise UserError(f"synchronous={first}: give the number of first groups to flush, or a callable.")
        return lambda group: group < first

    @property
    def clips_at(self) -> float | None:
        """`max_grad_norm`, whatever kind of number it is."""
        return None if self.max_grad_norm is None else float(self.max_grad_norm)

    @property
    def gradient_of_loss(self) -> float:
        """What each microbatch's loss counts: their mean is trained, or their sum (`scale_grads=False`)."""
        return 1.0 / self.n_microbatches if self.scale_grads else 1.0

    def of_all_ranks(self, correction: str) -> dict[str, object]:
        """What every rank has to be told alike, by argument. A cutover may be a stage's own."""
        first = self.synchronous
        return {
            "n_microbatches": self.n_microbatches,
            "correction": correction,
            "max_grad_norm": self.clips_at,
            "synchronous": "a callable" if callable(first) else int(first),
            "scale_grads": self.scale_grads,
            "data_reduction": self.data_reduction,
        }

    def check_module(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if parameter.dtype == torch.float16:
                raise _half(f"'{name}' in float16")

    def cut(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        target: Any,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
    ) -> list[Microbatch]:
        """A group's microbatches: whole batches are cut, lists of microbatches taken as they are."""
        if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.float16:
            raise _half("autocast to float16")
        if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
            specs = (self.args_chunk_spec, self.kwargs_chunk_spec)
            return split(args, kwargs, target, self.n_microbatches, *specs)
        return presplit(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, self.n_microbatches)


def _half(what: str) -> UserError:
    return UserError(
        f"{what} needs a gradient scaler, which the engine does not have: small gradients would vanish. Use bfloat16 "
        "(bank_dtype=torch.bfloat16), or float32."
    )

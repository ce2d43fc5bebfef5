"""A group's batch as m microbatches: cut along the first dimension, checked, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import UserError
from slipstream.torch_private import tree_flatten, tree_unflatten

Microbatch = tuple[tuple, dict[str, Any], Any]  # positional arguments, keyword arguments, target


def split(args: tuple, kwargs: dict[str, Any], target: Any, count: int) -> list[Microbatch]:
    """Equal microbatches. Tensors are cut along dimension 0; everything else goes to each microbatch as it is."""
    leaves, shape = tree_flatten((args, kwargs, target))
    batched = [isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves]
    rows = {leaf.shape[0] for leaf, cut in zip(leaves, batched, strict=True) if cut}
    if len(rows) > 1:
        raise UserError(f"The tensors of one group have different numbers of rows: {sorted(rows)}.")
    size = rows.pop() if rows else count
    if size == 0 or size % count:
        raise UserError(
            f"A batch of {size} rows cannot be cut into {count} equal microbatches. Give a multiple of {count} rows "
            "(drop or pad a short last batch) or change n_microbatches."
        )
    if count == 1:
        return [(args, kwargs, target)]
    each = size // count
    parts = [
        [leaf[index * each : (index + 1) * each] for index in range(count)] if cut else [leaf] * count
        for leaf, cut in zip(leaves, batched, strict=True)
    ]
    return [tree_unflatten([part[index] for part in parts], shape) for index in range(count)]


def joined(microbatches: Sequence[Microbatch]) -> Microbatch:
    """Some microbatches as one: the reverse of `split`."""
    flat = [tree_flatten(microbatch) for microbatch in microbatches]
    leaves = [
        torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim > 0 else parts[0]
        for parts in zip(*(found for found, _ in flat), strict=True)
    ]
    return tree_unflatten(leaves, flat[0][1])


def merged(outputs: Sequence[Any]) -> Any:
    """The outputs of all microbatches as one batch, also where they are tuples, lists or dictionaries of tensors."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs)) if outputs[0].ndim else torch.stack(list(outputs))
    if isinstance(outputs[0], tuple | list):
        return tuple(merged([o[i] for o in outputs]) for i in range(len(outputs[0])))
    if isinstance(outputs[0], Mapping):
        return {key: merged([o[key] for o in outputs]) for key in outputs[0]}
    return list(outputs)


def check_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        seen = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else repr(type(loss).__name__)
        )
        raise UserError(
            f"loss_fn must return a scalar tensor, not {seen}. Reduce it, for example with .mean()."
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError("The loss does not depend on any trainable parameter. Is it detached, or all frozen?")
    return loss.reshape(())


def as_predicate(synchronous: int | Callable[[int], bool]) -> Callable[[int], bool]:
    """`synchronous=N` flushes the first N groups; a callable says so for any group."""
    if callable(synchronous):
        return synchronous
    if synchronous < 0:
        raise UserError(
            f"synchronous={synchronous}: give the number of first groups to flush, or a callable."
        )
    return lambda group: group < synchronous

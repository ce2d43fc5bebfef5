"""A group's batch as m microbatches: cut along a dimension, checked, and put together again.

Torch's conventions: `TensorChunkSpec(dim)` says where a tensor is cut, None that every microbatch gets all of it;
without a spec tensors are cut along dimension 0. Ready-made lists (`arg_mbs`, `kwarg_mbs`, `target_mbs`) are taken as
they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import UserError
from slipstream.torch_late import is_chunk_spec
from slipstream.torch_private import is_replicate_spec, tree_flatten, tree_unflatten

Microbatch = tuple[tuple, dict[str, Any], Any]  # positional arguments, keyword arguments, target
ChunkSpec = Any  # a TensorChunkSpec, None, or a tree of them as the argument is one of tensors


def split(
    args: tuple,
    kwargs: dict[str, Any],
    target: Any,
    count: int,
    args_spec: Sequence[ChunkSpec] | None = None,
    kwargs_spec: Mapping[str, ChunkSpec] | None = None,
) -> list[Microbatch]:
    """Equal microbatches. What is no tensor goes to each microbatch as it is."""
    leaves, shape = tree_flatten((args, kwargs, target))
    places = _places(args, kwargs, target, args_spec, kwargs_spec)
    rows = {
        name: leaf.shape[dim] for leaf, (name, dim, _) in zip(leaves, places, strict=True) if dim is not None
    }
    if len(set(rows.values())) > 1:
        shown = ", ".join(f"{length} in {name}" for name, length in rows.items())
        raise UserError(
            f"The tensors of one group have different numbers of rows: {sorted(set(rows.values()))} ({shown}). Say "
            "what is not to be cut along dimension 0 with args_chunk_spec or kwargs_chunk_spec (None: not at all)."
        )
    size = next(iter(rows.values())) if rows else count
    if size == 0 or size % count:
        raise UserError(
            f"A batch of {size} rows cannot be cut into {count} equal microbatches. Give a multiple of {count} rows "
            "(drop or pad a short last batch) or change n_microbatches."
        )
    if count == 1:
        return [(args, kwargs, target)]
    for leaf, (name, dim, told) in zip(leaves, places, strict=True):
        _refuse_unclear(leaf, name, dim, told, size)
    each = size // count
    parts = [
        [leaf.narrow(dim, index * each, each) for index in range(count)]
        if dim is not None
        else [leaf] * count
        for leaf, (_, dim, _) in zip(leaves, places, strict=True)
    ]
    return [tree_unflatten([part[index] for part in parts], shape) for index in range(count)]


def _places(
    args: tuple, kwargs: dict[str, Any], target: Any, args_spec: Any, kwargs_spec: Any
) -> list[tuple[str, int | None, bool]]:
    """Of each leaf: a name for it, the dimension it is cut along (None: not at all), whether that is beyond doubt."""
    if args_spec is not None and args and len(args_spec) != len(args):
        raise UserError(f"args_chunk_spec has {len(args_spec)} entries for {len(args)} positional arguments.")
    if kwargs_spec and (unknown := [name for name in kwargs_spec if kwargs and name not in kwargs]):
        raise UserError(
            f"kwargs_chunk_spec names {unknown[0]!r}; the keyword arguments are {', '.join(kwargs)}."
        )
    found: list[tuple[str, int | None, bool]] = []
    for index, value in enumerate(args):
        spec = None if args_spec is None else args_spec[index]
        found += _of_argument(f"argument {index}", value, spec, args_spec is not None, index == 0)
    specs = kwargs_spec or {}
    for name, value in kwargs.items():
        found += _of_argument(f"'{name}'", value, specs.get(name), name in specs, False)
    return found + _of_argument("target", target, None, False, True)


def _of_argument(
    name: str, value: Any, spec: ChunkSpec, told: bool, sure: bool
) -> list[tuple[str, int | None, bool]]:
    leaves = tree_flatten(value)[0]
    if not told:
        cut = [isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves]
        return [(name, 0 if yes else None, sure) for yes in cut]
    if spec is None or is_chunk_spec(spec) or is_replicate_spec(spec):
        specs = [spec] * len(leaves)
    else:
        specs = tree_flatten(spec)[0]
    if len(specs) != len(leaves):
        raise UserError(f"The chunk spec of {name} has {len(specs)} leaves, the argument {len(leaves)}.")
    dims = [one.split_dim if is_chunk_spec(one) else None for one in specs]
    for leaf, dim in zip(leaves, dims, strict=True):
        if dim is not None and not (isinstance(leaf, Tensor) and -leaf.ndim <= dim < leaf.ndim):
            seen = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise UserError(f"The chunk spec of {name} cuts dimension {dim}, and there is {seen}.")
    return [(name, dim, True) for dim in dims]


def _refuse_unclear(leaf: Any, name: str, dim: int | None, told: bool, rows: int) -> None:
    """What could be meant for all rows at once must not be cut, or left whole, without a word."""
    if told:
        return
    if dim is not None and leaf.ndim >= 2 and leaf.shape[0] == leaf.shape[1] == rows:
        raise UserError(
            f"{name} has shape {tuple(leaf.shape)} in a group of {rows} rows: one row for each, or a table (a mask) "
            "for all? Say so with args_chunk_spec or kwargs_chunk_spec: TensorChunkSpec(0) cuts it, None does not."
        )
    shape = getattr(leaf, "shape", None)
    if type(leaf).__name__ == "BlockMask" and shape and shape[0] > 1:
        raise UserError(
            f"{name} is a BlockMask over {shape[0]} rows, which is not cut. Give kwarg_mbs with one for each "
            "microbatch, or a mask that is the same for all rows (B=None)."
        )


def presplit(
    args: tuple,
    kwargs: dict[str, Any],
    target: Any,
    arg_mbs: Sequence[Any] | None,
    kwarg_mbs: Sequence[dict[str, Any]] | None,
    target_mbs: Sequence[Any] | None,
    count: int,
) -> list[Microbatch]:
    """Microbatches that the caller has cut."""
    for name, mbs in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs), ("target_mbs", target_mbs)):
        if mbs is not None and (not isinstance(mbs, list | tuple) or len(mbs) != count):
            seen = f"{len(mbs)}" if isinstance(mbs, list | tuple) else type(mbs).__name__
            raise UserError(f"{name} must be a list of {count} microbatches, not {seen}.")
    if (args and arg_mbs) or (kwargs and kwarg_mbs) or (target is not None and target_mbs is not None):
        raise UserError(
            "Give a whole batch or lists of microbatches (arg_mbs, kwarg_mbs, target_mbs), not both."
        )
    whole = split(args, kwargs, target, count)
    positional = arg_mbs or [rest[0] for rest in whole]
    return [
        (
            tuple(positional[index]) if isinstance(positional[index], tuple | list) else (positional[index],),
            kwarg_mbs[index] if kwarg_mbs is not None else whole[index][1],
            target_mbs[index] if target_mbs is not None else whole[index][2],
        )
        for index in range(count)
    ]


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
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else None
        seen = shape or repr(type(loss).__name__)
        raise UserError(
            f"loss_fn must return a scalar tensor, not {seen}. Reduce it, for example with .mean()."
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError("The loss does not depend on any trainable parameter. Is it detached, or all frozen?")
    return loss.reshape(())

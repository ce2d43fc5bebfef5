"""Is a state what this run can go on with? Asked of every checkpoint before a tensor of it is used.

Checksums tell that the bytes are those that were written, not by whom: every part is held against a fresh engine's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError

_COMPARED = ("optimizer", "hyper", "memory", "buffers")  # by name, with those of a fresh engine
_OPTIONAL = ("memory", "buffers")


def check_weights(path: Path, weights: Mapping[str, Any], what: str = "master") -> None:
    """Real tensors of finite numbers; the first that is not is named."""
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CheckpointError(f"'{path}': the {what} of '{name}' is {kind}, not weights.")
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"'{path}': the {what} of '{name}' holds numbers that are not finite. Go back to an earlier "
                "checkpoint: delete or move this one."
            )


def check_state(path: Path, state: Mapping[str, Any], fresh: Mapping[str, Any], step: int) -> None:
    """`state`, as read and adapted, against `fresh`, what the engine holds before anything was loaded."""
    if state["group"] != step or isinstance(state["group"], bool):
        raise CheckpointError(
            f"'{path}' is called step {step}, and holds the state of step {state['group']!r}."
        )
    if not isinstance(state["skipped"], int) or not 0 <= state["skipped"] <= step:
        raise CheckpointError(f"'{path}' counts {state['skipped']!r} skipped updates of {step}.")
    check_weights(path, state["master"])
    for name, bank in state["banks"].items():
        check_weights(path, bank, f"bank '{name}'")
    if not all(isinstance(told, bool) for told in state["published"].values()):
        raise CheckpointError(f"'{path}' does not say which banks were published.")
    for section in _COMPARED:
        for name, expected in fresh.get(section, {}).items():
            found = state.get(section, {})
            if name in found:
                _same_kind(path, f"{section} of '{name}'", found[name], expected)
            elif section not in _OPTIONAL:
                raise CheckpointError(f"'{path}' lacks the {section} of '{name}'.")


def _same_kind(path: Path, what: str, found: Any, expected: Any) -> None:
    if expected is None:
        good = found is None or isinstance(found, bool | int | float | str)
    elif isinstance(expected, Tensor):
        good = isinstance(found, Tensor) and found.shape == expected.shape
        # A buffer may hold what is not finite from its making, as a mask of -inf.
        good = good and (_finite(found) or not _finite(expected))
    elif isinstance(expected, Mapping):
        good = isinstance(found, Mapping)
        if good and found and (missing := [key for key in expected if key not in found]):
            lacks = ", ".join(map(repr, missing[:4]))
            raise CheckpointError(
                f"'{path}': the {what} lacks {lacks}. It may come from another version of the optimizer."
            )
        for key in expected if good and found else ():
            _same_kind(path, f"{what}, '{key}'", found[key], expected[key])
    elif isinstance(expected, list | tuple):
        good = isinstance(found, list | tuple) and len(found) == len(expected)
        for own, other in zip(found, expected, strict=True) if good else ():
            _same_kind(path, what, own, other)
    elif isinstance(expected, bool | str):
        good = isinstance(found, type(expected))
    else:
        good = (
            isinstance(found, int | float)
            and not isinstance(found, bool)
            and abs(found) <= sys.float_info.max
        )
        good = good or (found is None and not isinstance(expected, int | float))
    if not good:
        raise CheckpointError(f"'{path}': the {what} is {_told(found)}; this run has {_told(expected)}.")


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}{'' if _finite(value) else ' that is not finite'}"
    if isinstance(value, Mapping):
        return f"a table of {', '.join(map(str, list(value)[:4])) or 'nothing'}"
    return repr(value)[:60]


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())

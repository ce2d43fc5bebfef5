"""Asynchronous pipeline-parallel pretraining for PyTorch.

The public names load lazily, so that commands which need no torch never import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slipstream.errors import CheckpointError, ConfigError, DataError, StageError, UserError

if TYPE_CHECKING:
    from slipstream.pipeline.emulator import Emulator
    from slipstream.pipeline.runtime import Schedule2BW
    from slipstream.pipeline.state import cloned_state, merge_states

__version__ = "0.2.0"

_LAZY = {
    "Emulator": "slipstream.pipeline.emulator",
    "Schedule2BW": "slipstream.pipeline.runtime",
    "cloned_state": "slipstream.pipeline.state",
    "merge_states": "slipstream.pipeline.state",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Emulator",
    "Schedule2BW",
    "StageError",
    "UserError",
    "__version__",
    "cloned_state",
    "merge_states",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'slipstream' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

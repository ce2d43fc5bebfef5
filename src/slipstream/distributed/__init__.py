"""Processes and process groups: who runs where, and how the ranks find each other.

`RankPool` starts ranks on this machine; `World` describes the ranks of a running job, whether
this package started them or torchrun did. Nothing else in the package reads environment variables.

Starting ranks needs no torch, and importing it takes seconds: what does need it loads on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slipstream.distributed.launch import RankPool, forwarded_signals, started_by_torchrun
from slipstream.distributed.partition import Partitions, partitioned

if TYPE_CHECKING:
    from slipstream.distributed.world import World, initialise

__all__ = [
    "Partitions",
    "RankPool",
    "World",
    "forwarded_signals",
    "initialise",
    "partitioned",
    "started_by_torchrun",
]


def __getattr__(name: str) -> Any:
    if name in ("World", "initialise"):
        return getattr(import_module("slipstream.distributed.world"), name)
    raise AttributeError(f"module 'slipstream.distributed' has no attribute {name!r}")

"""Whether something is one of torch's classes that take seconds to import, without importing them.

Nothing is sharded, wrapped by FSDP2 or a stage of `torch.distributed.pipelining` before somebody has imported what
makes it so. A run that has none of them starts in little more than half the time.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.pipelining.microbatch import TensorChunkSpec
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def imported(module: str) -> bool:
    return module in sys.modules


def _is_one(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def is_dtensor(value: object) -> TypeIs[DTensor]:
    return _is_one(value, "torch.distributed.tensor", "DTensor")


def is_fsdp(value: object) -> TypeIs[FSDPModule]:
    return _is_one(value, "torch.distributed.fsdp", "FSDPModule")


def is_chunk_spec(value: object) -> TypeIs[TensorChunkSpec]:
    return _is_one(value, "torch.distributed.pipelining.microbatch", "TensorChunkSpec")

"""How the process of a run computes. It is taken back at the end: a study trains one run after another in a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from slipstream.config.settings import TrainSettings
from slipstream.models.attention import attention_kernel

# Of cuBLAS: else streams may share one, and torch refuses. Read when a process first multiplies.
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def arithmetic(train: TrainSettings, device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        if train.dtype != "float32":
            stack.enter_context(_narrow_products())
        if train.deterministic and device.type != "cpu":  # where nothing has to be given up for it
            stack.enter_context(_same_bits_every_time())
        stack.enter_context(attention_kernel(train.attention))
        yield


@contextmanager
def _narrow_products() -> Iterator[None]:
    """What a narrow run leaves in float32 (the optimizer's) may take TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _same_bits_every_time() -> Iterator[None]:
    """No kernel that adds in whatever order its threads come, and none that is chosen by how long it took just now."""
    memory: Any = torch.utils.deterministic  # whose one setting is made at run time
    given = os.environ.get(_WORKSPACE)
    os.environ[_WORKSPACE] = given or ":4096:8"
    enabled = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # every tensor here is written before it is read
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=only_warned)
        memory.fill_uninitialized_memory = filled
        if given is None:
            del os.environ[_WORKSPACE]
        else:
            os.environ[_WORKSPACE] = given

"""What a function launches on a GPU, recorded as a CUDA graph without making anyone wait.

`torch.cuda.graph` waits for the whole device first; in a pipeline a message that is queued may wait for a neighbour,
and that one for us. A capture that fails leaves the stream and the random numbers as if it had not been tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")
Pool = Any  # torch's handle


@contextmanager
def beside(stream: torch.cuda.Stream) -> Iterator[None]:
    """On `stream`, after all that is queued on the current one and before all that will be."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.set_stream(current)  # a capture that fails leaves its own behind
        current.wait_stream(stream)


def captured(body: Callable[[], Made], pool: Pool | None = None) -> tuple[torch.cuda.CUDAGraph, Made]:
    """A graph of what `body` launches on the current stream, and what it returned, at fixed addresses. It launches
    nothing now."""
    graph = torch.cuda.CUDAGraph()
    # By thread: others pin memory and query events meanwhile.
    graph.capture_begin(pool=pool or torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
    try:
        try:
            made = body()
        except BaseException:
            with suppress(RuntimeError):  # says only that something failed, not what
                graph.capture_end()
            raise
        graph.capture_end()
    except BaseException:
        _end_capture_of_random_numbers()
        raise
    return graph, made


def _end_capture_of_random_numbers() -> None:
    """The generator believes that it is still recorded. A copy of its state does not."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())

"""How many decoder layers the head and the loss are worth on this machine, so that stages are cut evenly.

By FLOPs the head of a small model is worth some seven of its layers; the loss over a large vocabulary is bound by
memory and adds to that. Measured on every rank at the same time, as in the pipeline, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.bench import language
from slipstream.bench.stopwatch import Stopwatch
from slipstream.bench.work import Work, loss_of, prepare
from slipstream.distributed import RankPool, World

LAYERS, REPEATS = 4, 4


def measure_head_layers(pool: RankPool, work: Work, timeout_seconds: float) -> float:
    return median(pool.run(head_layers, work, ranks=work.stages, timeout=timeout_seconds))


def head_layers(world: World, work: Work) -> float:
    """One rank: the time of the head and the loss over the time of a layer, of one microbatch."""
    device, model, count = work.device_of(world.rank), work.model, work.model.layers
    spans = (range(LAYERS), range(count, count))
    layers, head = (
        language.build_part(
            model, span, first=False, last=span.start == count, device=device, dtype=work.dtype
        )
        for span in spans
    )
    for module in (layers, head):
        if (prepared := prepare(work)) is not None:
            prepared(module)
    loss = loss_of(work)
    value = language.hidden(model, work.batch, work.tokens, device, work.dtype, scale=1.0).requires_grad_()
    target = language.tokens(model, work.batch, work.tokens, device, seed=2)
    dist.barrier()
    seconds = [
        _seconds(layers, value),
        _seconds(nn.Sequential(head, _Against(loss, target)), value),
    ]
    return seconds[1] / (seconds[0] / LAYERS)


class _Against(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], target: Tensor) -> None:
        super().__init__()
        self.loss, self.target = loss, target

    def forward(self, logits: Tensor) -> Tensor:
        return self.loss(logits, self.target)


def _seconds(module: nn.Module, value: Tensor) -> float:
    """The least time of a forward and a backward."""
    watch = Stopwatch(value.device)
    for _ in range(REPEATS + 1):
        watch.mark()
        output = module(value)
        output.backward(torch.ones_like(output))
    watch.mark()
    watch.read()
    return min(end - start for start, end in zip(watch.moments[1:], watch.moments[2:], strict=False))

"""How many decoder layers the head and the loss are worth on this machine, so that stages are cut evenly.

By FLOPs the head of a small model is worth some seven of its layers; the loss over a large vocabulary is bound by
memory and adds to that. Measured on every rank at the same time, as in the pipeline, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.bench import language
from slipstream.bench.contenders import Stopwatch
from slipstream.bench.work import Work
from slipstream.distributed import RankPool, World

LAYERS, REPEATS = 4, 4


def measure_head_layers(pool: RankPool, work: Work, timeout_seconds: float) -> float:
    return median(pool.run(head_layers, work, ranks=work.stages, timeout=timeout_seconds))


def head_layers(world: World, work: Work) -> float:
    """One rank: the time of the head and the loss over the time of a layer, of one microbatch."""
    device, model, count = work.device_of(world.rank), work.model, work.model.layers
    layers, head = (
        language.build_part(model, span, first=False, last=last, device=device, dtype=work.dtype)
        for span, last in ((range(LAYERS), False), (range(count, count), True))
    )
    work.prepare(layers)
    work.prepare(head)
    loss = work.loss()
    value = language.hidden(model, work.batch, work.tokens, device, work.dtype, scale=1.0).requires_grad_()
    target = language.tokens(model, work.batch, work.tokens, device, seed=2)
    dist.barrier()
    of_layers = _seconds(layers, value)
    return _seconds(lambda hidden: loss(head(hidden), target), value) / (of_layers / LAYERS)


def _seconds(compute: Callable[[Tensor], Tensor], value: Tensor) -> float:
    """The least time of a forward and a backward."""
    watch = Stopwatch(value.device)
    for _ in range(REPEATS + 1):
        watch.mark()
        output = compute(value)
        output.backward(torch.ones_like(output))
    watch.mark()
    return min(end - start for start, end in pairwise(watch.read()[1:]))

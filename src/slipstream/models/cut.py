"""Where a model is cut into stages: between two layers, or inside one, between its attention and its MLP.

The same hidden states cross either cut, so a cut inside a layer costs no more; with few layers to a stage it leaves
much less idle. Positions are counted in layers: 2.5 lies inside layer 2, behind its attention. Stages are balanced by
FLOPs, or by what they were measured to take.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil, floor, inf
from typing import NamedTuple

from slipstream.errors import UserError
from slipstream.models.sizes import ModelConfig, attention_flops, head_cost, layer_cost

WORTH_CUTTING_A_LAYER = 0.02  # of the slowest stage's time
# A head is one large product, and often quicker than its FLOPs: measured 0.8 of them at 42M on a GPU, less on a CPU. A
# cut inside a layer has to pay in either case.
QUICK_HEAD = 0.75


class Layers(NamedTuple):
    """Those of a stage, from `start` up to `stop`."""

    start: float
    stop: float

    def halves(self) -> dict[int, tuple[bool, bool]]:
        """Of each layer, whether its attention and its MLP are here."""
        return {
            layer: (layer >= self.start, layer + 1 <= self.stop)
            for layer in range(floor(self.start), ceil(self.stop))
        }


def split(
    config: ModelConfig,
    num_stages: int,
    boundaries: Sequence[float] | None = None,
    sequence: int = 1024,
    whole_layers: bool = False,
) -> list[Layers]:
    """The layers of each stage: cut at `boundaries` (where stages 1, 2, ... begin), or balanced."""
    if num_stages < 1 or (boundaries is None and num_stages > config.layers):
        raise UserError(
            f"{config.layers} layers cannot form {num_stages} stages of at least one layer. "
            f"Set pipeline.stages between 1 and {config.layers}."
        )
    if boundaries is None:
        boundaries = _balanced(config, num_stages, sequence, whole_layers)
    edges = [0, *boundaries, config.layers]
    if len(edges) != num_stages + 1 or not rising(edges):
        raise UserError(
            f"pipeline.boundaries {list(boundaries)} do not cut {config.layers} layers into {num_stages} "
            f"stages. List {num_stages - 1} increasing layer numbers between 0 and {config.layers}; 2.5 is inside "
            "layer 2, behind its attention."
        )
    return [Layers(*edge) for edge in pairwise(edges)]


def at_half(position: int) -> float:
    """A position that is counted in halves of layers, in layers."""
    return position / 2 if position % 2 else position // 2


def rising(edges: Sequence[float]) -> bool:
    """Whether they are layers or halves of them, each behind the one before."""
    return all(a < b for a, b in pairwise(edges)) and all(2 * edge == int(2 * edge) for edge in edges)


def measured_cut(
    seconds: Sequence[float], layers: Sequence[Layers], attention: float, whole_layers: bool = False
) -> tuple[list[float], float]:
    """The boundaries by which the slowest of these stages would be quickest, and what part of its time would be left.

    `seconds`: what each stage takes, in any unit. Layers are taken to cost the same, as much as those of the stages
    between the first and the last do, `attention` of it for the attention; what these two take beyond their layers is
    the embedding's and the head's.
    """
    stages = len(layers)
    if stages == 1:
        return [], 1.0
    plain = range(1, stages - 1) if stages > 2 else range(1)
    layer = sum(seconds[stage] for stage in plain) / sum(_size(layers[stage], attention) for stage in plain)
    first, last = (seconds[stage] - layer * _size(layers[stage], attention) for stage in (0, -1))
    count = int(layers[-1].stop)
    edges = _cheapest(
        count, stages, (attention * layer, (1 - attention) * layer), (first, last), whole_layers
    )
    cut = [Layers(*edge) for edge in pairwise(edges)]
    taken = [layer * _size(part, attention) for part in cut]
    taken[0] += first
    taken[-1] += last
    if max(taken) >= max(seconds) * (1 - 1e-9):  # as it is, unless another is better
        return [part.start for part in layers[1:]], 1.0
    return edges[1:-1], max(taken) / max(seconds)


def _size(layers: Layers, attention: float) -> float:
    return sum(attention * first + (1 - attention) * second for first, second in layers.halves().values())


def _balanced(config: ModelConfig, stages: int, sequence: int, whole_layers: bool) -> list[float]:
    """By FLOPs. The embedding is a lookup; the head sits on the last stage."""
    attention, layer = attention_flops(config, sequence), layer_cost(config, sequence).forward_flops
    head = head_cost(config).forward_flops
    found, by_layer = (
        _cheapest(config.layers, stages, (attention, layer - attention), (0.0, head), whole)
        for whole in (whole_layers, True)
    )

    def costliest(edges: list[float]) -> float:
        sizes = [layer * _size(Layers(*edge), attention / layer) for edge in pairwise(edges)]
        return max(*sizes[:-1], sizes[-1] + QUICK_HEAD * head) if len(sizes) > 1 else sizes[0]

    pays = costliest(found) <= (1 - WORTH_CUTTING_A_LAYER) * costliest(by_layer)
    return (found if pays else by_layer)[1:-1]


def _cheapest(
    count: int,
    stages: int,
    halves: tuple[float, float],
    extra: tuple[float, float],
    whole_layers: bool,
) -> list[float]:
    """Edges in layers; none inside a layer unless that is worth it. `extra`: beyond layers, of the first and the last
    stage."""
    by_layer, costliest = _cut([sum(halves)] * count, stages, extra)
    if whole_layers:
        return [*by_layer]
    by_half, costliest_half = _cut([*halves] * count, stages, extra)
    if costliest_half > (1 - WORTH_CUTTING_A_LAYER) * costliest:
        return [*by_layer]
    return [at_half(edge) for edge in by_half]


def _cut(costs: list[float], stages: int, extra: tuple[float, float]) -> tuple[list[int], float]:
    costs[0] += extra[0]
    costs[-1] += extra[1]
    edges = balanced(costs, stages)
    return edges, max(sum(costs[a:b]) for a, b in pairwise(edges))


def balanced(costs: Sequence[float], count: int) -> list[int]:
    """Edges of `count` neighbouring parts whose costliest is cheapest; of several such cuts the most even one, longer
    parts first."""
    costs = [max(0.0, cost) for cost in costs]
    total = [0.0, *accumulate(costs)]
    limit = _least_costliest(costs, count) * (1 + 1e-9)
    value: dict[int, float] = {0: 0.0}  # by the end of the parts so far: the least sum of their squares
    choices: list[dict[int, int]] = []
    for part in range(count):
        found: dict[int, float] = {}
        choice: dict[int, int] = {}
        for end in range(part + 1, len(costs) - (count - part - 1) + 1):
            best = inf
            for start in range(end - 1, part - 1, -1):
                cost = total[end] - total[start]
                if cost > limit:
                    break
                if start in value and value[start] + cost * cost < best * (1 - 1e-9):
                    best, choice[end] = value[start] + cost * cost, start
            if end in choice:
                found[end] = best
        value = found
        choices.append(choice)
    edges = [len(costs)]
    for choice in reversed(choices):
        edges.append(choice[edges[-1]])
    return edges[::-1]


def _least_costliest(costs: Sequence[float], count: int) -> float:
    """By trying: a limit can be kept if filling one part after the other up to it takes no more than `count`."""
    low, high = max(costs), sum(costs)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        parts, filled = 1, 0.0
        for cost in costs:
            if filled + cost > middle:
                parts, filled = parts + 1, 0.0
            filled += cost
        low, high = (low, middle) if parts <= count else (middle, high)
    return high

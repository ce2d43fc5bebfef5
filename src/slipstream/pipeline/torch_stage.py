"""What the engine takes from a stage of `torch.distributed.pipelining`, hand-made or traced.

The engine runs the stage's module itself; from torch's object it needs the module, its place and its group. A
traced stage may read values of any earlier stage: `Route` carries such values along the chain, so that each stage
still talks to its neighbours only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.errors import UserError
from slipstream.torch_private import is_pipeline_stage, is_traced, traced_graph

Value = tuple[int, int]  # (stage that makes it, index among that stage's outputs)


@dataclass(frozen=True)
class StageInfo:
    """A stage as the engine sees it."""

    module: nn.Module
    index: int
    count: int
    device: torch.device
    group: dist.ProcessGroup | None
    route: Route

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


class Route:
    """How a message from the stage before becomes the module's arguments and the message to the next stage."""

    def run(self, call: Callable[..., Any], message: Sequence[Tensor], kwargs: dict[str, Any]) -> Any:
        """A hand-made stage: the message is the arguments, the output is the message."""
        return call(*message, **kwargs)


class _TracedRoute(Route):
    def __init__(
        self, arguments: list[Value | None], incoming: list[Value], outgoing: list[Value], index: int
    ) -> None:
        self._arguments = arguments  # None: an argument of the whole model (first stage)
        self._incoming = incoming
        self._outgoing = outgoing
        self._index = index

    def run(self, call: Callable[..., Any], message: Sequence[Tensor], kwargs: dict[str, Any]) -> Any:
        if self._index == 0:
            outputs = call(*message, **kwargs)
        else:
            known = dict(zip(self._incoming, message, strict=True))
            outputs = call(*(known[value] for value in self._arguments if value is not None), **kwargs)
        if not self._outgoing:
            return outputs
        made = outputs if isinstance(outputs, tuple | list) else (outputs,)
        known = dict(zip(self._incoming, message, strict=True)) if self._index else {}
        known.update({(self._index, position): output for position, output in enumerate(made)})
        return tuple(known[value] for value in self._outgoing)


def read_stage(stage: Any) -> StageInfo:
    """Check and unpack a `PipelineStage`. The trainer says itself what the engine needs of one: torch's takes a second
    to import."""
    if isinstance(stage, StageInfo):
        return stage
    if not is_pipeline_stage(stage):
        raise UserError(
            f"Schedule2BW takes a torch.distributed.pipelining.PipelineStage, not {type(stage).__name__}. "
            "Wrap your module: PipelineStage(module, stage_index, num_stages, device)."
        )
    size = dist.get_world_size(stage.group) if dist.is_initialized() else 1
    if size != stage.num_stages:
        raise UserError(
            f"The pipeline has {stage.num_stages} stages on {size} ranks. 2BW runs one stage per rank: "
            "make as many stages as there are ranks in the stage's group."
        )
    route = _traced_route(stage) if is_traced(stage) else Route()
    device = torch.device(stage.device)
    return StageInfo(stage.submod, stage.stage_index, stage.num_stages, device, stage.group, route)


def _traced_route(stage: Any) -> Route:
    node, graph, stages = traced_graph(stage)
    needs: dict[int, list[Value | None]] = {}
    for call in graph.nodes:
        if call.op == "call_module":
            needs[stages[call.name]] = [_source(argument, stages) for argument in call.args]
    index = stages[node.name]
    if index and any(value is None for value in needs[index]):
        raise UserError(
            f"Stage {index} of the traced model reads an argument of the whole model. Let the first stage read "
            "it and pass on what later stages need."
        )
    return _TracedRoute(needs[index], _carried(needs, index), _carried(needs, index + 1), index)


def _carried(needs: dict[int, list[Value | None]], receiver: int) -> list[Value]:
    """Values that cross the link into `receiver`: made before it, read by it or by a later stage."""
    crossing = {
        value
        for reader, values in needs.items()
        if reader >= receiver
        for value in values
        if value is not None and value[0] < receiver
    }
    return sorted(crossing)


def _source(argument: Any, stages: dict[str, int]) -> Value | None:
    if argument.op == "placeholder":
        return None
    if argument.op == "call_function" and argument.target is operator.getitem:
        maker, position = argument.args
        return stages[maker.name], position
    return stages[argument.name], 0

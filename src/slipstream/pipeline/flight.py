"""The microbatches of one stage between their forward and their backward: what each action computes, sends and awaits.

When an action runs is the schedule's business (`runtime.py`); which weights it reads is that of `versions.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.errors import StageError, UserError
from slipstream.pipeline.depth import Depth
from slipstream.pipeline.gradients import Accumulator
from slipstream.pipeline.host_sum import PeerLost
from slipstream.pipeline.links import Links
from slipstream.pipeline.messages import Spec, spec_of
from slipstream.pipeline.microbatches import Microbatch, check_loss
from slipstream.pipeline.options import Options
from slipstream.pipeline.replica import Replica, before_backward, give_back
from slipstream.pipeline.stage_graphs import Modes, RecordedCall
from slipstream.pipeline.torch_stage import Route, StageInfo
from slipstream.pipeline.trace import Trace
from slipstream.pipeline.update import Updater
from slipstream.pipeline.versions import Versions
from slipstream.schedule.actions import Kind
from slipstream.torch_late import is_dtensor
from slipstream.torch_private import tree_map

Result = tuple[Tensor | None, Any]  # of a microbatch on the last stage: its loss and its output


class _InFlight(NamedTuple):
    group: int
    microbatch: int
    replica: Replica
    modes: Modes
    inputs: list[Tensor]
    outputs: list[Tensor]  # on the last stage, the loss


class Flight:
    """Forwards, backwards in the same order, and how many are between. `len` of it is in flight."""

    def __init__(
        self,
        stage: StageInfo,
        options: Options,
        versions: Versions,
        links: Links,
        updater: Updater,
        depth: Depth,
        trace: Trace,
        loss: Callable[..., Tensor],
    ) -> None:
        self._stage, self._options, self._versions = stage, options, versions
        self._links, self._updater, self._depth, self._trace = links, updater, depth, trace
        (self._settled,) = updater.settled
        self._loss_of = loss
        self._accumulator = Accumulator(
            versions.master, versions.names, at_once=True, dtype=options.gradient_dtype
        )
        self._waiting: deque[_InFlight] = deque()
        self._spec: Spec | None = None  # of this stage's output, fixed by the first microbatch
        self._fitted = False  # to a depth that will not change
        self.loss_kwargs: dict[str, Any] = {}  # of the group or evaluation whose forwards run

    def __len__(self) -> int:
        return len(self._waiting)

    def forward(self, group: int, index: int, microbatch: Microbatch, keep_output: bool) -> Result:
        args, kwargs, target = microbatch
        replica = self._versions.replica(group, index)
        self._settled.put(self._settled.modes)
        left = self._options.n_microbatches - 1 - index
        inputs = list(args) if self._stage.first else self._links.receive_activations(group, index, left)
        reads = self._versions.reads(group, index).index
        recorded = replica.call if isinstance(replica.call, RecordedCall) else None
        joined = recorded is not None and not keep_output and self._can_join(kwargs, target)
        if recorded is not None and joined:
            recorded = recorded.with_loss(self._loss_alone)
        output: Any = None
        loss: Tensor | None = None
        with self._trace.action(Kind.FORWARD, group, index, reads), self._watched():
            if recorded is not None and joined:
                loss = recorded(*inputs, target)
            else:
                output = self._stage.route.run(replica.call, inputs, kwargs)
                loss = self._loss(output, target) if self._stage.last else None
        if self._depth.is_open and recorded is not None and not recorded.settled:
            self._depth.recording()
        outputs = [loss] if loss is not None else _as_message(output)
        self._waiting.append(_InFlight(group, index, replica, self._settled.modes, inputs, outputs))
        if loss is None:
            self._send(group, index, outputs)
            return None, None
        # A recorded stage writes there again once this microbatch is through.
        kept = loss.detach().clone() if joined else loss.detach()
        return kept, _detached(output, recorded is not None) if keep_output else None

    def _can_join(self, kwargs: dict[str, Any], target: Any) -> bool:
        """Whether the loss can be recorded together with the stage: it depends on one tensor beside the output."""
        alone = not kwargs and not self.loss_kwargs and type(self._stage.route) is Route
        return alone and self._stage.last and isinstance(target, Tensor)

    def _watched(self) -> AbstractContextManager[None]:
        return self._depth.room.forward() if self._depth.asks_for_room else nullcontext()

    def _send(self, group: int, index: int, outputs: list[Tensor]) -> None:
        spec = spec_of(outputs)
        if self._spec is None:
            self._spec = spec
            self._depth.link_seconds = self._links.introduce(spec)
        elif spec != self._spec:
            raise UserError(
                f"Stage {self._stage.index} returned {_shapes(spec)} for group {group}, microbatch {index}, but "
                f"{_shapes(self._spec)} before. Every microbatch must have the same shapes: pad or drop the odd one."
            )
        self._links.send_activations(group, index, outputs, spec)

    def backward(self) -> None:
        """Of the oldest in flight. After the last one of a group, its update begins."""
        group, index, replica, modes, inputs, outputs = self._waiting.popleft()
        self._settled.put(modes)
        if self._stage.last:
            roots, grads = outputs, [torch.full_like(outputs[0], self._options.gradient_of_loss)]
        else:
            roots = [output for output in outputs if output.requires_grad]
            grads = self._links.receive_gradients(group, index)
        microbatches = self._options.n_microbatches
        if index == 0:  # the sum before gives its memory back, as far as other stages are not needed for that
            self._updater.advance()
            self._updater.settle()
        with self._trace.action(Kind.BACKWARD, group, index, self._versions.reads(group, index).index):
            # Of those that read this replica.
            last = index + 1 in (self._versions.cutover(group), microbatches)
            before_backward(replica.shards, last)
            self._accumulator.enter(replica, group * microbatches + index)
            if roots:
                torch.autograd.backward(roots, grads)
            self._accumulator.add(replica)
            if last:
                give_back(replica.shards)
        if not self._stage.first:
            self._links.send_gradients(group, index, inputs, keep=microbatches)
        self._versions.park(group, index, self._updater.completed, keep=self._updater.copying)
        if index + 1 == microbatches:
            self._depth.measure(self._updater.status, self._trace.pair_seconds, self._trace.last_update)
            self._updater.begin(group, self._accumulator.take())
        else:
            self._updater.advance()

    def land(self) -> None:
        """Every backward that is left."""
        while self._waiting:
            self.backward()

    def fit(self) -> None:
        """Between two groups: land what is more than the depth has room for, and once that has been chosen give back
        the memory of recordings that only deeper trials needed."""
        while len(self._waiting) > self._depth.warm_up:
            self.backward()
        if self._fitted or self._depth.is_open:
            return
        self._fitted = True
        self._keep_recordings(self._depth.warm_up + 1)

    def await_weights(self, group: int, microbatch: int) -> None:
        """They come from update index - 1, which must be done, gathers and all, and its group's backwards before it:
        a stage that waited first, with more in flight than come before the cutover, would wait for ever."""
        read = self._versions.reads(group, microbatch)
        while self._waiting and self._waiting[0].group < read.index:
            self.backward()
        finish = self._updater.finish_bank if read.kind == "bank" else self._updater.finish
        try:
            finish(read.index - 1)
        except PeerLost as error:
            lost = self._links.lost_neighbour()
            if lost is None:
                raise
            raise StageError(f"{error}. {lost} before group {group}, microbatch {microbatch}.") from error

    def evaluate(
        self, microbatches: Sequence[Microbatch], has_target: bool, keep_output: bool
    ) -> list[Result]:
        """Forwards at the master; nothing else is in flight."""
        results: list[Result] = []
        spec = self._links.hear_evaluation()
        for index, (args, kwargs, target) in enumerate(microbatches):
            message = self._links.receive_evaluation(index, spec) if spec else list(args)
            output = self._stage.route.run(self._versions.master.call, message, kwargs)
            if self._stage.last:
                loss = self._loss(output, target).detach() if has_target else None
                results.append((loss, output if keep_output else None))
            else:
                self._links.send_evaluation(index, _as_message(output))
        self._links.finish_sends()
        return results

    def _loss(self, output: Any, target: Any) -> Tensor:
        return check_loss(self._loss_of(output, target, **self.loss_kwargs))

    def _loss_alone(self, output: Any, target: Any) -> Tensor:
        """Without arguments of the group."""
        return check_loss(self._loss_of(output, target))

    def _keep_recordings(self, in_flight: int) -> None:
        for replica in self._versions.replicas:
            if isinstance(replica.call, RecordedCall):
                replica.call.keep_slots(in_flight)

    def clear(self) -> None:
        self._waiting.clear()
        self._keep_recordings(0)


def _as_message(output: Any) -> list[Tensor]:
    outputs = list(output) if isinstance(output, tuple | list) else [output]
    for item in outputs:
        if not isinstance(item, Tensor):
            raise UserError(f"A stage must return tensors for the next one, not {type(item).__name__}.")
        if is_dtensor(item):
            raise UserError(
                f"A stage returned a DTensor laid out as {item.placements}. Links carry plain tensors: let its last "
                "layer give a local one (output_layouts=Replicate(), use_local_output=True)."
            )
    return outputs


def _detached(output: Any, copied: bool) -> Any:
    def detach(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone() if copied else leaf.detach()

    return tree_map(detach, output)


def _shapes(spec: Spec) -> str:
    return ", ".join(f"{tuple(s.shape)} {str(s.dtype).removeprefix('torch.')}" for s in spec)

"""A stage's neighbours: what it sends them and receives from them, and when a send is known to have arrived.

Forward k is answered by gradient k; gradient k is answered by a later forward, at most m further on. A send is
waited for when its answer is here, so the wait returns at once (on gloo a send cannot be polled); only a drain
blocks. The receive of gradient j is posted when the last activation that the stage behind computes before it has been
sent: that is in good time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.distributed import wires
from slipstream.distributed.groups import Groups, Scope, Wait
from slipstream.distributed.ring import Door, RingReader, RingWriter, socket_folder
from slipstream.distributed.slots import HostSlots
from slipstream.errors import UserError
from slipstream.pipeline import in_stream
from slipstream.pipeline.attendant import Attendant
from slipstream.pipeline.channel import GroupIn, GroupOut, Incoming, Outbox, Outgoing, RingIn, RingOut
from slipstream.pipeline.messages import Spec, blank, differentiable, spec_of
from slipstream.pipeline.neighbours import Neighbour, Waiting
from slipstream.pipeline.peers import InStream, OnDevice
from slipstream.pipeline.torch_stage import StageInfo

PINGS = 5
CLOSING_SECONDS = 2.0  # a dying process closes its connections one after the other


class Links:
    """The channels of one stage: activations in and out, gradients in and out. All ranks make theirs together."""

    slow_seconds: ClassVar[float] = 0.0  # by which messages are late, where a slow network is played

    _activations_in: Incoming
    _gradients_out: Outgoing
    _activations_out: Outgoing
    _gradients_in: Incoming

    def __init__(
        self,
        stage: StageInfo,
        groups: Groups | None,
        *,
        warm_up_behind: Callable[[], int],
        lead: Callable[[], int],
        timeout_seconds: float,
    ) -> None:
        """`groups`: where the ranks find each other; None for a stage that is alone. `lead`: by how many pairs the
        stage before is ahead of this one."""
        self._stage = stage
        self._warm_up_behind, self._lead = warm_up_behind, lead
        self._timeout_seconds = timeout_seconds
        self._incoming: Spec | None = None  # of the activations, once the stage before has told
        self._expected = 0  # receives of activations that are posted and not taken
        self._awaited: deque[Spec] = deque()  # gradients of what was sent whose receive is not posted yet
        self._posted = 0  # receives of gradients that are posted and not taken
        # Under way, and what each is called in an error.
        self._activation_sends: deque[tuple[list[Wait], str]] = deque()
        self._gradient_sends: deque[tuple[list[Wait], str]] = deque()
        self._before: Neighbour | None = None
        self._behind: Neighbour | None = None
        self._waiting = Waiting(())
        self.attendant: Attendant | None = None  # where messages wait on the device
        self._channels: list[Incoming | Outgoing] = []
        if groups is None or stage.count == 1:
            return
        if groups.kind == "nccl" and Links.slow_seconds:
            raise UserError(
                "A slow link cannot be played over NCCL, whose messages wait on the device. Use stages on the CPU."
            )
        self._meet_neighbours(groups.scope)
        neighbours = [n for n in (self._before, self._behind) if n is not None]
        self._waiting = Waiting(neighbours)
        if groups.kind == "nccl":
            self._waiting = self.attendant = Attendant(neighbours, _with_index(stage.device))
            groups.close_first(self.attendant.close)
        try:
            self._open(groups)
        except BaseException:
            self.close()
            raise
        if self.attendant is not None:
            self.attendant.start()

    # Making them ------------------------------------------------------------------------------------------

    def _meet_neighbours(self, scope: Scope) -> None:
        index, ranks = self._stage.index, self._ranks()
        places = [place for place in (index - 1, index + 1) if 0 <= place < self._stage.count]
        store = scope.under(f"wires/{ranks[0]}")
        found = wires.connect(
            store, dist.get_rank(), [ranks[place] for place in places], self._timeout_seconds
        )
        for place in places:
            neighbour = Neighbour(place, found[ranks[place]], self._timeout_seconds)
            if place < index:
                self._before = neighbour
            else:
                self._behind = neighbour

    def _ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._stage.group or dist.group.WORLD)

    def _open(self, groups: Groups) -> None:
        device, index = self._stage.device, self._stage.index
        near = {n.stage for n in (self._before, self._behind) if n and n.wire.near and device.type == "cpu"}
        rings = _rings(groups.scope, self._ranks(), index, near, self._timeout_seconds)
        staged = device.type == "cuda" and groups.kind == "gloo"
        # Every other link first: then no pair of stages waits for another pair to be connected.
        for link in sorted(
            range(max(0, index - 1), min(index + 1, self._stage.count - 1)), key=lambda i: (i % 2, i)
        ):
            lower = link == index
            neighbour = self._behind if lower else self._before
            assert neighbour is not None
            if neighbour.stage in rings:
                writer, reader = rings[neighbour.stage]
                out: Outgoing = RingOut(neighbour, writer)
                into: Incoming = RingIn(neighbour, reader)
            else:
                pair = [self._ranks()[link], self._ranks()[link + 1]]
                forward, backward = (
                    groups.device(f"link/{pair[0]}-{pair[1]}/{way}", pair, link=way)
                    for way in ("forward", "backward")
                )
                if self.attendant is not None and lower:
                    out = in_stream.ActivationsOut(neighbour, forward, device, self.attendant)
                    into = in_stream.GradientsIn(neighbour, backward, device, self.attendant)
                elif self.attendant is not None:
                    out = in_stream.GradientsOut(neighbour, backward, device, self.attendant)
                    into = in_stream.ActivationsIn(neighbour, forward, device, self.attendant)
                else:
                    out = GroupOut(neighbour, forward if lower else backward)
                    into = GroupIn(neighbour, backward if lower else forward, device, staged)
            if staged or Links.slow_seconds:
                out = Outbox(neighbour, out, device, Links.slow_seconds)
            self._channels += [out, into]
            if lower:
                self._activations_out, self._gradients_in = out, into
            else:
                self._gradients_out, self._activations_in = out, into

    def introduce(self, spec: Spec) -> float:
        """Tell the next stage the shapes to expect, and time the link there; returns seconds one way."""
        assert self._behind is not None
        self._behind.tell_shapes(spec)
        message = blank(spec, self._stage.device)
        best = float("inf")
        for _ in range(PINGS):
            start = time.perf_counter()
            self._gradients_in.post(differentiable(spec))
            handles = self._activations_out.send(message)
            self._gradients_in.receive("an answer to the timing of the link")
            if self._stage.device.type == "cuda":
                answered = torch.cuda.Event()
                answered.record(torch.cuda.current_stream(self._stage.device))
                self.wait_for(OnDevice(answered))
            best = min(best, time.perf_counter() - start)
            self._activations_out.finish(handles, "the timing of the link")
        return best / 2

    def _be_introduced(self) -> Spec:
        """The other end of `introduce`."""
        assert self._before is not None
        spec = self._before.hear_shapes(self._waiting)
        answer = blank(differentiable(spec), self._stage.device)
        for _ in range(PINGS):
            self._activations_in.post(spec)
            self._activations_in.receive("the timing of the link")
            self._gradients_out.finish(self._gradients_out.send(answer), "the timing of the link")
        return spec

    # Training ---------------------------------------------------------------------------------------------

    def begin_group(self) -> None:
        if self._before is not None:
            self._before.groups += 1
        if self._behind is not None:
            self._behind.tell_group()

    def receive_activations(self, group: int, index: int, left: int) -> list[Tensor]:
        """The input of a microbatch; `left`: how many more the group has.

        A message over gloo sets out when its receive is posted. So as many are posted as the stage before may have
        sent: else no depth hides a slow link.
        """
        if self._incoming is None:
            self._incoming = self._be_introduced()
        while self._expected < 1 + min(self._lead(), left):
            self._activations_in.post(self._incoming)
            self._expected += 1
        received = self._activations_in.receive(f"the activations of group {group}, microbatch {index}")
        self._expected -= 1
        assert self._before is not None
        if self.attendant is None:  # which heeds by itself
            self._before.listen()
        self._before.refuse_evaluation()
        for tensor, spec in zip(received, self._incoming, strict=True):
            tensor.requires_grad_(spec.requires_grad)
        return received

    def send_activations(self, group: int, index: int, outputs: list[Tensor], spec: Spec) -> None:
        what = f"the activations of group {group}, microbatch {index}"
        self._activation_sends.append((self._activations_out.send(outputs), what))
        self._awaited.append(differentiable(spec))
        while len(self._awaited) > self._warm_up_behind():
            self._post_gradient()

    def _post_gradient(self) -> None:
        self._gradients_in.post(self._awaited.popleft())
        self._posted += 1

    def receive_gradients(self, group: int, index: int) -> list[Tensor]:
        if not self._posted:
            self._post_gradient()
        received = self._gradients_in.receive(f"the gradient of group {group}, microbatch {index}")
        self._posted -= 1
        self._activations_out.finish(*self._activation_sends.popleft())  # answered by this
        return received

    def send_gradients(self, group: int, index: int, inputs: list[Tensor], keep: int) -> None:
        grads = []
        for tensor in inputs:
            if tensor.requires_grad:
                grads.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        what = f"the gradient of group {group}, microbatch {index}"
        self._gradient_sends.append((self._gradients_out.send(grads), what))
        while len(self._gradient_sends) > keep:
            self._gradients_out.finish(*self._gradient_sends.popleft())

    def finish_sends(self) -> None:
        """Block until everything sent has been received."""
        while self._activation_sends:
            self._activations_out.finish(*self._activation_sends.popleft())
        while self._gradient_sends:
            self._gradients_out.finish(*self._gradient_sends.popleft())

    # Evaluation: forwards only, over the same channels ----------------------------------------------------

    def hear_evaluation(self) -> Spec | None:
        """The shapes of an evaluation's activations, told before its first microbatch; None on the first stage."""
        return None if self._before is None else self._before.hear_evaluation(self._waiting)

    def receive_evaluation(self, index: int, spec: Spec) -> list[Tensor]:
        self._activations_in.post(spec)
        return self._activations_in.receive(f"the activations of evaluation microbatch {index}")

    def send_evaluation(self, index: int, outputs: list[Tensor]) -> None:
        if index == 0:
            assert self._behind is not None
            self._behind.tell_evaluation(spec_of(outputs))
        what = f"the activations of evaluation microbatch {index}"
        self._activation_sends.append((self._activations_out.send(outputs), what))

    # Waiting and ending -----------------------------------------------------------------------------------

    def wait_for(self, wait: Wait) -> None:
        """Wait for something of an update. Where the device may have been lost with a neighbour, not for ever."""
        if self.attendant is not None and not isinstance(wait, InStream):
            self.attendant.poll(wait, self._timeout_seconds)
        wait.wait()

    def lost_neighbour(self) -> str | None:
        """A neighbour that is known to be gone, and how: it died, it gave up on another one, or it stands still."""
        ends = [neighbour for neighbour in (self._before, self._behind) if neighbour is not None]
        deadline = time.monotonic() + CLOSING_SECONDS
        while ends and time.monotonic() < deadline:
            for neighbour in ends:
                if neighbour.wire.hung_up():
                    return f"{neighbour} {neighbour.wire.loss}"
            time.sleep(0.01)
        return None

    def close(self) -> None:
        self._waiting.close()
        for channel in self._channels:
            channel.close()
        for neighbour in (self._before, self._behind):
            if neighbour is not None:
                neighbour.wire.close()
                neighbour.heed.clear()  # the channels, and with them memory of the device


def _with_index(device: torch.device) -> torch.device:
    """A thread of its own has another current device."""
    return (
        device
        if device.type != "cuda" or device.index is not None
        else torch.device("cuda", torch.cuda.current_device())
    )


def _rings(
    scope: Scope, ranks: list[int], index: int, near: set[int], timeout_seconds: float
) -> dict[int, tuple[RingWriter, RingReader]]:
    """A ring to and from each stage of `near`: whoever writes knocks at the reader's door."""
    if not near:
        return {}
    store = scope.under(f"rings/{ranks[0]}")
    with socket_folder() as folder:
        door = Door(folder)
        store.set(f"door/{index}", door.path)
        store.wait([f"door/{stage}" for stage in near], timedelta(seconds=timeout_seconds))
        writers = {
            stage: RingWriter(
                door.knock(store.get(f"door/{stage}").decode(), index), HostSlots, timeout_seconds
            )
            for stage in sorted(near)
        }
        readers: dict[int, RingReader] = {}
        while len(readers) < len(near):
            stage, end = door.admit(timeout_seconds)
            readers[stage] = RingReader(end, HostSlots)
        door.close()
    return {stage: (writers[stage], readers[stage]) for stage in near}

"""A stage's neighbours: what it sends them and receives from them, and when a send is known to have arrived.

Forward k is answered by gradient k; gradient k is answered by a later forward, at most m further on. A send is
waited for when its answer is here, so the wait returns at once (on gloo a send cannot be polled); only a drain
blocks.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.pipeline.checks import check_connections
from slipstream.pipeline.mesh import new_group
from slipstream.pipeline.peers import Wait
from slipstream.pipeline.shared import SharedChannel, accept, offer
from slipstream.pipeline.torch_stage import StageInfo
from slipstream.pipeline.transport import Channel, Link, Spec, differentiable, spec_of

PINGS = 5
CLOSING_SECONDS = 2.0  # a dying process closes its connections one after the other


class Links:
    """The channels of one stage: activations in and out, gradients in and out.

    The process groups' channels carry shapes and evaluations throughout, and training where a link cannot be shared.
    """

    def __init__(
        self, stage: StageInfo, microbatches: int, timeout_seconds: float, latency_seconds: float
    ) -> None:
        self._stage = stage
        self._slots = microbatches + 2
        self._incoming: Spec | None = None  # of the activations, once the stage before has told
        self._activation_sends: deque[list[Wait]] = deque()
        self._gradient_sends: deque[list[Wait]] = deque()
        self._evaluation_sends: deque[list[Wait]] = deque()
        if stage.count == 1:
            return
        check_connections(stage.count, dist.get_backend(stage.group), _eager())
        ranks = dist.get_process_group_ranks(stage.group or dist.group.WORLD)
        timeout = timedelta(seconds=timeout_seconds)
        backend = None if dist.get_backend(stage.group) != "gloo" else "gloo"
        forward, backward = (new_group(ranks, timeout, backend) for _ in range(2))
        # A slow network is tried out on the process groups, which is where messages can be delayed.
        self._may_share = stage.device.type == "cpu" and not latency_seconds

        def channel(group: dist.ProcessGroup, peer: int) -> Channel:
            return Channel(Link(group, ranks[peer], peer, stage.device, timeout_seconds, latency_seconds))

        if not stage.first:
            self._from_before = channel(forward, stage.index - 1)
            self._to_before = channel(backward, stage.index - 1)
            self._activations_in: Channel | SharedChannel = self._from_before
            self._gradients_out: Channel | SharedChannel = self._to_before
        if not stage.last:
            self._to_behind = channel(forward, stage.index + 1)
            self._from_behind = channel(backward, stage.index + 1)
            self._activations_out: Channel | SharedChannel = self._to_behind
            self._gradients_in: Channel | SharedChannel = self._from_behind

    def introduce(self, spec: Spec) -> float:
        """Tell the next stage the shapes to expect, and time the link there; returns seconds one way."""
        self._to_behind.send_spec(spec)
        if self._may_share and (shared := offer(self._to_behind, self._from_behind, spec, self._slots)):
            self._activations_out, self._gradients_in = shared
        message = _blank(spec, self._stage.device)
        best = float("inf")
        for _ in range(PINGS):
            start = time.perf_counter()
            self._gradients_in.post(differentiable(spec))
            handles = self._activations_out.send(message)
            self._gradients_in.receive("an answer to the timing of the link")
            if self._to_behind.link.in_stream:
                torch.cuda.synchronize(self._stage.device)
            best = min(best, time.perf_counter() - start)
            self._activations_out.finish(handles, "the timing of the link")
        return best / 2

    def _meet(self) -> Spec:
        """The other end of `introduce`."""
        spec = self._from_before.receive_spec()
        if self._may_share and (shared := accept(self._from_before, self._to_before, spec, self._slots)):
            self._activations_in, self._gradients_out = shared
        answer = _blank(differentiable(spec), self._stage.device)
        for _ in range(PINGS):
            self._activations_in.post(spec)
            self._activations_in.receive("the timing of the link")
            self._gradients_out.finish(self._gradients_out.send(answer), "the timing of the link")
        return spec

    def receive_activations(self, group: int, index: int, more: bool) -> list[Tensor]:
        """The input of a microbatch; the next receive of the group is posted before this one is used."""
        if self._incoming is None:
            self._incoming = self._meet()
        if index == 0:
            self._activations_in.post(self._incoming)
        if more:
            self._activations_in.post(self._incoming)
        received = self._activations_in.receive(f"the activations of group {group}, microbatch {index}")
        for tensor, spec in zip(received, self._incoming, strict=True):
            tensor.requires_grad_(spec.requires_grad)
        return received

    def send_activations(self, group: int, index: int, outputs: list[Tensor], spec: Spec) -> None:
        self._gradients_in.post(differentiable(spec))
        self._activation_sends.append(self._activations_out.send(outputs))

    def receive_gradients(self, group: int, index: int) -> list[Tensor]:
        what = f"the gradient of group {group}, microbatch {index}"
        received = self._gradients_in.receive(what)
        self._activations_out.finish(self._activation_sends.popleft(), "activations")  # answered by this
        return received

    def send_gradients(self, group: int, index: int, inputs: list[Tensor], keep: int) -> None:
        grads = []
        for tensor in inputs:
            if tensor.requires_grad:
                grads.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        self._gradient_sends.append(self._gradients_out.send(grads))
        while len(self._gradient_sends) > keep:
            self._gradients_out.finish(self._gradient_sends.popleft(), f"the gradient of group {group}")

    def finish_sends(self) -> None:
        """Block until everything sent has been received."""
        while self._activation_sends:
            self._activations_out.finish(self._activation_sends.popleft(), "activations")
        while self._gradient_sends:
            self._gradients_out.finish(self._gradient_sends.popleft(), "gradients")
        while self._evaluation_sends:
            self._to_behind.finish(self._evaluation_sends.popleft(), "activations of an evaluation")

    def closed_neighbour(self) -> str | None:
        """A neighbour whose link is known to be closed, by name: it died, or it gave up on another one."""
        found = [getattr(self, name, None) for name in ("_activations_in", "_gradients_in")]
        ends = [end for end in found if end is not None and end.closed() is not None]
        deadline = time.monotonic() + CLOSING_SECONDS
        while ends and time.monotonic() < deadline:
            for end in ends:
                if end.closed():
                    return str(end.link)
            time.sleep(0.01)
        return None

    def exchange_evaluation_spec(self, index: int, spec: Spec | None) -> Spec | None:
        """The shapes of an evaluation's activations, told before its first microbatch."""
        if self._stage.first:
            return None
        return self._from_before.receive_spec() if index == 0 else spec

    def receive_evaluation(self, index: int, spec: Spec) -> list[Tensor]:
        self._from_before.post(spec)
        return self._from_before.receive(f"the activations of evaluation microbatch {index}")

    def send_evaluation(self, index: int, outputs: list[Tensor]) -> None:
        if index == 0:
            self._to_behind.send_spec(spec_of(outputs))
        self._evaluation_sends.append(self._to_behind.send(outputs))


def _eager() -> bool:
    """Whether torch connects groups when they are made, and not when they are first used."""
    return getattr(dist.group.WORLD, "bound_device_id", None) is not None


def _blank(spec: Spec, device: torch.device) -> list[Tensor]:
    return [torch.zeros(s.shape, dtype=s.dtype, device=device) for s in spec]

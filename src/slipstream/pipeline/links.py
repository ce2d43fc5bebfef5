"""A stage's neighbours: what it sends them and receives from them, and when a send is known to have arrived.

Forward k is answered by gradient k; gradient k is answered by a later forward, at most m further on. A send is
waited for when its answer is here, so the wait returns at once (on gloo a send cannot be polled); only a drain
blocks. Evaluations use the forward channel between drains.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.pipeline.mesh import new_group
from slipstream.pipeline.peers import Wait
from slipstream.pipeline.torch_stage import StageInfo
from slipstream.pipeline.transport import Channel, Link, Spec, spec_of

PINGS = 5


class Links:
    """The channels of one stage: activations in and out, gradients in and out."""

    def __init__(self, stage: StageInfo, timeout_seconds: float, latency_seconds: float) -> None:
        self._stage = stage
        self._incoming: Spec | None = None  # of the activations, once the stage before has told
        self._activation_sends: deque[list[Wait]] = deque()
        self._gradient_sends: deque[list[Wait]] = deque()
        if stage.count == 1:
            return
        ranks = dist.get_process_group_ranks(stage.group or dist.group.WORLD)
        timeout = timedelta(seconds=timeout_seconds)
        backend = None if dist.get_backend(stage.group) != "gloo" else "gloo"
        forward, backward = (new_group(ranks, timeout, backend) for _ in range(2))

        def channel(group: dist.ProcessGroup, peer: int) -> Channel:
            return Channel(Link(group, ranks[peer], peer, stage.device, timeout_seconds, latency_seconds))

        if not stage.first:
            self._activations_in = channel(forward, stage.index - 1)
            self._gradients_out = channel(backward, stage.index - 1)
        if not stage.last:
            self._activations_out = channel(forward, stage.index + 1)
            self._gradients_in = channel(backward, stage.index + 1)

    def introduce(self, spec: Spec) -> float:
        """Tell the next stage the shapes to expect, and time the link there; returns seconds one way."""
        self._activations_out.send_spec(spec)
        message = _blank(spec, self._stage.device)
        best = float("inf")
        for _ in range(PINGS):
            start = time.perf_counter()
            self._gradients_in.post(spec)
            handles = self._activations_out.send(message)
            self._gradients_in.receive("an answer to the timing of the link")
            best = min(best, time.perf_counter() - start)
            self._activations_out.finish(handles, "the timing of the link")
        return best / 2

    def _meet(self) -> Spec:
        """The other end of `introduce`."""
        spec = self._activations_in.receive_spec()
        for _ in range(PINGS):
            self._activations_in.post(spec)
            message = self._activations_in.receive("the timing of the link")
            self._gradients_out.finish(self._gradients_out.send(message), "the timing of the link")
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
        self._gradients_in.post(tuple(s for s in spec if s.requires_grad))
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

    def exchange_evaluation_spec(self, index: int, spec: Spec | None) -> Spec | None:
        """The shapes of an evaluation's activations, told before its first microbatch."""
        if self._stage.first:
            return None
        return self._activations_in.receive_spec() if index == 0 else spec

    def receive_evaluation(self, index: int, spec: Spec) -> list[Tensor]:
        self._activations_in.post(spec)
        return self._activations_in.receive(f"the activations of evaluation microbatch {index}")

    def send_evaluation(self, index: int, outputs: list[Tensor]) -> None:
        if index == 0:
            self._activations_out.send_spec(spec_of(outputs))
        self._activation_sends.append(self._activations_out.send(outputs))


def _blank(spec: Spec, device: torch.device) -> list[Tensor]:
    return [torch.zeros(s.shape, dtype=s.dtype, device=device) for s in spec]

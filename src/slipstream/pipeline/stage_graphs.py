"""Forward and backward of a stage as CUDA graphs: one launch each where the host made a hundred.

A pipeline keeps several microbatches between forward and backward, and what a forward leaves for its backward lies in
the memory of the recording. So there is a *slot* for each microbatch in flight, with memory of its own, and a replica
is recorded once for each slot that it meets. Replicas share a slot's memory: it holds one microbatch at a time.

Invariants: a recording computes what the plain call computes, in the same order, so nothing changes but who launches
the kernels. A forward takes a slot and its backward gives it back; what the forward returned is good until then. A
backward adds to sums that lie at fixed places, the same for all replicas of a stage; they are `.grad` of the weights,
and whoever takes them away gets copies (`release`). Weights are written in place: replicas that are recorded keep their
memory between groups, and where one has given it back (a master in halves, put together for a validation) it is
recorded again. What cannot be recorded is computed plainly for ever, with one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.cuda_graphs import beside, captured
from slipstream.lists import add_, copy_, zero_
from slipstream.torch_private import run_grad_hooks

PLAIN_CALLS = 2  # of each replica before it is recorded
MOST_SLOTS = 32  # in flight; any more are computed plainly

Modes = tuple[bool, ...]  # of the parts of a module: whether each is in training mode
Outputs = list[Tensor]
Forward = Callable[[], Outputs]
Backward = Callable[[Outputs], None]
Loss = Callable[[Any, Any], Tensor]


class Recorder(Protocol):
    """Something that can run two functions again without Python, the second on what the first has left."""

    def record(
        self, forward: Forward, backward: Backward
    ) -> tuple[Outputs, Callable[[], None], Callable[[], None]]:
        """What `forward` will have returned, at fixed addresses, and calls that run each of the two. Both are run once
        before anything is recorded, so that what they make the first time is there."""
        ...


class StageCudaGraphs:
    """Of one slot: its graphs share a pool, and lie over each other in it. `stream`: the one that is recorded."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream

    def record(
        self, forward: Forward, backward: Backward
    ) -> tuple[Outputs, Callable[[], None], Callable[[], None]]:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        with beside(self._stream):
            drawn = generator.get_state()
            # Libraries make their workspaces for this stream, and compilers their code.
            backward(forward())
            generator.set_state(drawn)  # a plain call would draw the numbers only once
            first, outputs = captured(forward, self._pool)
            second, _ = captured(lambda: backward(outputs), self._pool)
        return [output.detach() for output in outputs], first.replay, second.replay


def stage_graphs() -> StageGraphs:
    """Of CUDA graphs, on the current device."""
    stream = torch.cuda.Stream()
    return StageGraphs(lambda: StageCudaGraphs(stream))


@dataclass(frozen=True)
class Recording:
    """A replica in one slot, at fixed addresses."""

    slot: Slot
    inputs: list[Tensor]
    outputs: Outputs
    differentiable: list[bool]  # by output
    seeds: list[Tensor]  # gradients of those that are
    input_grads: list[Tensor | None]
    sums: Sums
    weights: list[nn.Parameter]  # those that get a gradient
    places: list[int]  # where all of them were
    forward: Callable[[], None]
    backward: Callable[[], None]  # adds to the sums


@dataclass(eq=False)
class Sums:
    """Of the gradients of a stage's weights. `users`: the weights of all replicas: a group's gradients go over from one
    to the other."""

    tensors: list[Tensor]
    users: Sequence[nn.Parameter]

    def are_of(self, weights: Sequence[nn.Parameter]) -> bool:
        return all(weight.grad is total for weight, total in zip(weights, self.tensors, strict=True))

    def clear(self) -> None:
        """Begin anew. Whoever's gradients they still are gets copies."""
        own = {id(total) for total in self.tensors}
        for weight in self.users:
            if weight.grad is not None and id(weight.grad) in own:
                weight.grad = weight.grad.clone()
        zero_(self.tensors)

    def give(self, weights: Sequence[nn.Parameter]) -> None:
        """After the first backward since they were cleared: gradients, as autograd would give them."""
        if all(weight.grad is None for weight in weights):
            for weight, total in zip(weights, self.tensors, strict=True):
                weight.grad = total
            return
        pairs = list(zip(weights, self.tensors, strict=True))
        add_([w.grad for w, _ in pairs if w.grad is not None], [t for w, t in pairs if w.grad is not None])
        for weight, total in pairs:
            if weight.grad is None:
                weight.grad = total.clone()


@dataclass(eq=False)
class Slot:
    """The memory of one microbatch in flight."""

    recorder: Recorder
    taken: bool = False


class StageGraphs:
    """The slots of a rank, and the sums that its recordings share. `make`: a recorder for a new slot."""

    def __init__(self, make: Callable[[], Recorder]) -> None:
        self._make: Callable[[], Recorder] | None = make
        self._slots: list[Slot] = []
        self._sums: dict[tuple[object, ...], Sums] = {}
        self._weights: list[nn.Parameter] = []  # of all that is wrapped

    def wrap(self, module: nn.Module, call: Callable[..., Any]) -> RecordedCall:
        recorded = RecordedCall(self, module, call)
        self._weights.extend(recorded.weights)
        return recorded

    def take(self) -> Slot | None:
        slot = next((slot for slot in self._slots if not slot.taken), None)
        if slot is None and self._make is not None and len(self._slots) < MOST_SLOTS:
            slot = Slot(self._make())
            self._slots.append(slot)
        if slot is not None:
            slot.taken = True
        return slot

    @property
    def broken(self) -> bool:
        return self._make is None

    def keep(self, count: int) -> None:
        """No more than `count` slots, and those with a microbatch in them first."""
        self._slots.sort(key=lambda slot: not slot.taken)
        del self._slots[count:]

    def holds(self, slot: Slot) -> bool:
        return slot in self._slots

    def give_up(self, why: RuntimeError) -> None:
        self._make = None
        self._slots.clear()  # memory that plain calls may need; what is in flight still adds to the sums
        warnings.warn(
            "A stage cannot be recorded as CUDA graphs, so its kernels are launched one by one: "
            f"{str(why).splitlines()[0]}",
            stacklevel=2,
        )

    def sums(self, weights: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> Sums:
        """Laid out as the weights, in the gradients' dtypes; the same for all replicas of a stage."""
        key = tuple(
            (w.shape, w.stride(), w.device, grad.dtype) for w, grad in zip(weights, grads, strict=True)
        )
        if key not in self._sums:
            pairs = zip(weights, grads, strict=True)
            tensors = [torch.empty_like(w.detach(), dtype=grad.dtype) for w, grad in pairs]
            self._sums[key] = Sums(tensors, self._weights)
        return self._sums[key]

    def clear(self) -> None:
        for sums in self._sums.values():
            sums.clear()

    def release(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """`grads` for whoever keeps them: copies of those that are sums, to which the next backward adds."""
        own = {id(total) for sums in self._sums.values() for total in sums.tensors}
        copies = {id(grad): torch.empty_like(grad) for grad in grads if grad is not None and id(grad) in own}
        copy_(list(copies.values()), [grad for grad in grads if grad is not None and id(grad) in copies])
        return [grad if grad is None else copies.get(id(grad), grad) for grad in grads]


class RecordedCall:
    """A prepared module that is computed as CUDA graphs wherever a backward will follow."""

    settled = True  # the last call was as all later ones will be
    fixed_addresses = True  # the memory of its weights is not given back from group to group

    def __init__(self, graphs: StageGraphs, module: nn.Module, call: Callable[..., Any]) -> None:
        self._graphs, self._module, self._call = graphs, module, call
        self.weights = [p for p in module.parameters() if p.requires_grad]
        self._recordings: dict[Slot, Recording] = {}
        self.modes: Modes = ()
        self._kind: tuple[object, ...] | None = None  # of the microbatches that are recorded: the first's
        self._calls = 0
        self._anchor: Tensor | None = None
        self._single = True  # whether it returns a tensor, and not several
        self._with_loss: tuple[Loss, RecordedCall] | None = None
        self.release = graphs.release

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._graphs.broken:
            self.settled = True
            self._recordings.clear()  # what is in flight keeps its own
        slot = None if kwargs or not torch.is_grad_enabled() else self._slot_for(args)
        if slot is None:
            return self._call(*args, **kwargs)
        places = [weight.data_ptr() for weight in self.weights]
        recording = self._recordings.get(slot)
        self.settled = recording is not None and recording.places == places
        if recording is None or recording.places != places:
            recording = self._record(slot, args, places)
        if recording is None:
            slot.taken = False
            return self._call(*args)
        if self._anchor is None:
            self._anchor = torch.zeros((), device=recording.outputs[0].device, requires_grad=True)
        # Autograd visits every weight that it is given, which takes as long as the launch. So they get their gradients
        # from us, and the anchor asks for a backward where nothing else does.
        outputs = _Replayed.apply(recording, *args, self._anchor)
        return outputs[0] if self._single else outputs

    def keep_slots(self, count: int) -> None:
        """Give back the memory of all recordings but those of `count` slots; one that is in flight keeps its own."""
        self._graphs.keep(count)
        self._recordings = {s: found for s, found in self._recordings.items() if self._graphs.holds(s)}
        if self._with_loss is not None:
            self._with_loss[1].keep_slots(count)

    def with_loss(self, loss: Loss) -> RecordedCall:
        """The same for its arguments and a target: the loss of its output, recorded together with it."""
        if self._with_loss is None or self._with_loss[0] != loss:
            plain = self._call
            joined = RecordedCall(self._graphs, self._module, lambda *args: loss(plain(*args[:-1]), args[-1]))
            self._with_loss = (loss, joined)
        self._with_loss[1].modes = self.modes
        return self._with_loss[1]

    def _slot_for(self, args: Sequence[Any]) -> Slot | None:
        if self._graphs.broken or not all(isinstance(arg, Tensor) for arg in args):
            return None
        kind = (self.modes, *((arg.shape, arg.dtype, arg.device, arg.requires_grad) for arg in args))
        self._kind = self._kind or kind
        self._calls += 1
        self.settled = self._calls > PLAIN_CALLS
        return self._graphs.take() if kind == self._kind and self.settled else None

    def _record(self, slot: Slot, args: Sequence[Tensor], places: list[int]) -> Recording | None:
        self._graphs.clear()  # what is run before it is recorded adds to the sums
        inputs = [arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args]
        # Autograd knows the weights of microbatches in flight by the stream they are on, and would make this one wait
        # for it. So they are recorded under other names.
        aliases = {weight: nn.Parameter(weight.detach()) for weight in self.weights}
        leaves = [leaf for leaf in inputs if leaf.requires_grad]
        differentiable: list[bool] = []
        seeds: list[Tensor] = []
        input_grads: list[Tensor | None] = []
        weights: list[nn.Parameter] = []
        found_sums: list[Sums] = []

        def forward() -> Outputs:
            # Casts of the weights that a caller under autocast keeps are of other weights, in memory of others.
            torch.clear_autocast_cache()
            with _exchanged(self._module, aliases):
                made = self._call(*inputs)
            torch.clear_autocast_cache()
            self._single = isinstance(made, Tensor)
            outputs = [made] if isinstance(made, Tensor) else list(made)
            if not all(isinstance(output, Tensor) for output in outputs):
                raise RuntimeError("it returns something else than tensors.")
            differentiable[:] = [output.requires_grad for output in outputs]
            return outputs

        def backward(outputs: Outputs) -> None:
            roots = [output for output in outputs if output.requires_grad]
            first = not seeds
            if first:
                seeds.extend(torch.zeros_like(root) for root in roots)
            wanted = [*leaves, *aliases.values(), *(self.weights if first else [])]
            with _exchanged(self._module, aliases):  # which computes layers again that kept nothing
                found = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
            of_inputs, of_weights, strays = (
                found[: len(leaves)],
                found[len(leaves) :][: len(aliases)],
                found[len(leaves) + len(aliases) :],
            )
            if any(grad is not None for grad in strays):
                raise RuntimeError("it uses weights that are not attributes of its modules.")
            if first:
                input_grads.extend(None if g is None else torch.empty_like(g) for g in of_inputs)
                pairs = zip(self.weights, of_weights, strict=True)
                weights.extend(weight for weight, grad in pairs if grad is not None)
                found_sums.append(self._graphs.sums(weights, _present(of_weights)))
            with torch.no_grad():
                copy_(_present(input_grads), _present(of_inputs))
                add_(found_sums[0].tensors, _present(of_weights))

        try:
            outputs, replay_forward, replay_backward = slot.recorder.record(forward, backward)
        except RuntimeError as error:
            self._graphs.give_up(error)
            return None
        own = iter(input_grads)
        by_input = [next(own) if leaf.requires_grad else None for leaf in inputs]
        recording = Recording(
            slot, inputs, outputs, differentiable, seeds, by_input, found_sums[0], weights, places, replay_forward,
            replay_backward,
        )  # fmt: skip
        self._recordings[slot] = recording
        return recording


class _Replayed(torch.autograd.Function):
    """A recording between what came before the stage and what comes after it."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.recording = recording
        ctx.set_materialize_grads(False)
        copy_(recording.inputs, tensors[: len(recording.inputs)])
        recording.forward()
        outputs = tuple(output.detach() for output in recording.outputs)
        pairs = zip(outputs, recording.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in pairs if not differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        recording: Recording = ctx.recording
        pairs = zip(grads, recording.differentiable, strict=True)
        given = [grad for grad, differentiable in pairs if differentiable]
        for seed, grad in zip(recording.seeds, given, strict=True):
            seed.zero_() if grad is None else seed.copy_(grad)
        going_on = recording.sums.are_of(recording.weights)
        if not going_on:
            recording.sums.clear()
        recording.backward()
        if not going_on:
            recording.sums.give(recording.weights)
        for weight in recording.weights:
            run_grad_hooks(weight)
        of_inputs = [None if grad is None else grad.clone() for grad in recording.input_grads]
        recording.slot.taken = False
        return (None, *of_inputs, None)


@contextmanager
def _exchanged(module: nn.Module, others: dict[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """The module with other parameters in the places of its own."""
    places = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in others
    ]
    for owner, name, parameter in places:
        setattr(owner, name, others[parameter])
    try:
        yield
    finally:
        for owner, name, parameter in places:
            setattr(owner, name, parameter)


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]

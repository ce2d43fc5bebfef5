"""The rule of 2BW in one process: the same versions, the same update, no pipeline.

    step g: m forwards and backwards at what `staleness.reads` says they read, then update g.

`cutover=c` makes the first c microbatches of a group read the bank and the others the newest weights (`None`: all m
read the bank); a list, one per module of `stages`, lets every stage switch at its own. `delay=0` is synchronous
training; `delay=d` takes every gradient d updates late; a list of delays is original PipeDream. `mismatch` gives the
backward newer weights than the forward had, as an engine without stashing (PACI) does. On a GPU, update g is finished
after the kernels of group g+1 that do not depend on it are queued: the host then never waits for the norm.

`fuse` computes neighbouring microbatches that read the same weights as one. The mean over microbatches is then a mean
over rows, equal to rounding for a loss that is a mean over its rows: for studies, where large batches are quicker.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UserError
from slipstream.optim.corrections import Correction, build_correction, check_mixed
from slipstream.pipeline import state as states
from slipstream.pipeline.agreement import names_repeat, prefix_of
from slipstream.pipeline.checks import check_covers, check_layers, evaluating, optimizer_of, split_shared
from slipstream.pipeline.engine import Engine, refuse_in_hook
from slipstream.pipeline.gradients import Accumulator
from slipstream.pipeline.graphs import Graphs, Recorder, check_current
from slipstream.pipeline.microbatches import ChunkSpec, Microbatch, check_loss, joined, merged
from slipstream.pipeline.options import OptimizerFactory, Options
from slipstream.pipeline.peers import Gradients, Peers
from slipstream.pipeline.replica import Prepare, Replica
from slipstream.pipeline.update import Updater
from slipstream.pipeline.versions import Versions
from slipstream.schedule.cutover import Cutover, GivenCutover
from slipstream.schedule.timeline import Span


class Emulator(Engine):
    """Trains `module` (or the chain of `stages`) as an asynchronous pipeline would, in one process.

    Arguments that `Schedule2BW` has too mean the same, but for `cutover=None`: all is old here, since nothing says how
    many stages there would be. With the cutover that the engine has (`schedule.cutover(group)`) both follow one
    trajectory, to the last bit on a CPU in float32.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        n_microbatches: int = 1,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        optimizer: OptimizerFactory | None = None,
        correction: str | Correction = "error_feedback",
        max_grad_norm: float | None = None,
        delay: int | Sequence[int] = 1,
        *,
        synchronous: int | Callable[[int], bool] = 0,
        cutover: GivenCutover | Sequence[int] = None,
        stages: Sequence[nn.Module] | None = None,
        mismatch: int | Sequence[int] = 0,
        bank_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        prepare: Prepare | None = None,
        args_chunk_spec: Sequence[ChunkSpec] | None = None,
        kwargs_chunk_spec: Mapping[str, ChunkSpec] | None = None,
        scale_grads: bool = True,
        recorder: Recorder | None = None,
        fuse: bool = False,
    ) -> None:
        if (module is None) == (stages is None):
            raise UserError("Give the Emulator either a module or stages=[modules], not both.")
        self._options = Options(
            n_microbatches, loss_fn, optimizer, correction, max_grad_norm, synchronous, bank_dtype, gradient_dtype,
            prepare, scale_grads=scale_grads, args_chunk_spec=args_chunk_spec, kwargs_chunk_spec=kwargs_chunk_spec,
        )  # fmt: skip
        assert loss_fn is not None
        assert optimizer is not None
        modules = [module] if module is not None else list(stages or [])
        self._module = module if module is not None else nn.ModuleList(modules)
        delays = _per_stage("delay", delay, len(modules))
        self.mismatches = _per_stage("mismatch", mismatch, len(modules))
        if any(lag > late for lag, late in zip(self.mismatches, delays, strict=True)):
            raise UserError(f"A mismatch of {self.mismatches} cannot exceed the delay of {delays}.")
        if recorder is not None and any(self.mismatches):
            raise UserError(
                "A recorded microbatch has one set of weights: drop the mismatch or the recorder."
            )
        correction = build_correction(correction)
        cutovers = _cutovers(cutover, delays, n_microbatches, self._options.flushed)
        _check_cutover(cutovers, cutover, delays, self.mismatches, correction)
        if recorder is not None:
            check_current(next((p.device for p in self._module.parameters()), torch.device("cpu")))
        self._options.check_module(self._module)
        check_layers(self._module)
        ties = split_shared(self._module)
        self.n_microbatches = n_microbatches
        self.loss_fn = loss_fn
        self._fuse = fuse
        self._versions = [
            Versions(
                part,
                old,
                delay=late,
                looks_ahead=correction.looks_ahead,
                bank_dtype=bank_dtype,
                prepare=prepare,
            )
            for part, old, late in zip(modules, cutovers, delays, strict=True)
        ]
        tied = {name: shared[0] for shared in ties for name in shared}
        if names_repeat(
            [{name: tied.get(f"{i}.{name}") for name in v.names} for i, v in enumerate(self._versions)]
        ):
            for index, versions in enumerate(self._versions):
                versions.prefix = prefix_of(index)
        self._accumulators = [Accumulator(v.master, v.names, dtype=gradient_dtype) for v in self._versions]
        dtypes = [p.dtype for v in self._versions for p in v.master.parameters]
        self._graphs = Graphs(recorder, self._loss, dtypes) if recorder else None
        trained = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        names = list(trained)
        peers = Peers(len(names), [[names.index(name) for name in tie] for tie in ties if tie[0] in names])
        self.optimizer = optimizer_of(optimizer, self._module)
        self._updater = Updater(self._versions, self.optimizer, correction, self._options.clips_at, peers)
        check_covers(self.optimizer, self._module, trained)
        # Groups that do not read the newest weights can be queued before the host knows the norm.
        self._in_slack = all(delays) and any(p.is_cuda for p in self._updater.parameters)
        self.group = 0

    @property
    def master(self) -> nn.Module:
        """The module with the newest weights."""
        self.drain()
        return self._module

    def step(
        self,
        x: Any,
        y: Any = None,
        *,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> list[Tensor]:
        """One group: its m microbatches and its update. Returns the m losses, each at the weights it read.

        `step(x, target=y, losses=losses)`, as of `Schedule2BW`, does the same; it keeps no outputs. On a GPU the update
        may be pending still: `master` finishes it, the module that was handed in does not.
        """
        if return_outputs:
            raise UserError("The Emulator's step keeps no outputs: drop return_outputs=True, or use eval.")
        refuse_in_hook(self._updater.in_hook)
        group, updater = self.group, self._updater
        updater.enter(group)
        found: list[Tensor] = []
        chunks = self._options.cut(_flat((x,)), kwargs, _one_target(y, target))
        try:
            for microbatch, count in self._cut(group, chunks):
                index = len(found)
                updater.finish(max(versions.reads(group, index).index for versions in self._versions) - 1)
                found += [self._microbatch(group, index, count, microbatch)] * count
        except BaseException:
            self._take()  # or the next step would count what the first microbatches left
            raise
        grads = self._take()
        updater.finish_all()
        updater.begin(group, grads)
        if not self._in_slack:
            updater.finish_all()
        self.group += 1
        if losses is not None:
            losses[:] = found
        return found

    def _cut(self, group: int, chunks: list[Microbatch]) -> list[tuple[Microbatch, int]]:
        """The microbatches and how many each stands for: those between two cutovers together where `fuse` says so."""
        if not self._fuse:
            return [(chunk, 1) for chunk in chunks]
        cuts = sorted({versions.cutover(group) for versions in self._versions} | {0, len(chunks)})
        return [(joined(chunks[first:end]), end - first) for first, end in pairwise(cuts)]

    def _take(self) -> Gradients:
        """The gradients collected so far; nothing is left behind."""
        return [grad for collected in self._accumulators for grad in collected.take()]

    def _microbatch(self, group: int, index: int, count: int, microbatch: Microbatch) -> Tensor:
        """Forward and backward of a microbatch, which stands for `count` of them; its loss."""
        replicas = [versions.replica(group, index) for versions in self._versions]
        for replica, accumulator in zip(replicas, self._accumulators, strict=True):
            accumulator.enter(replica, group * self.n_microbatches + index)
        loss, weight = None, count / self.n_microbatches if self._options.scale_grads else count
        if self._graphs is not None:
            modes = tuple(settled.modes for settled in self._updater.settled)
            loss = self._graphs.run(group, self._updater.completed, replicas, microbatch, weight, modes)
        if loss is None:
            loss = self._loss(replicas, microbatch)
            with self._newer_weights(group) if any(self.mismatches) else contextlib.nullcontext():
                loss.backward(torch.full_like(loss, weight))
            loss = loss.detach()
        for replica, accumulator in zip(replicas, self._accumulators, strict=True):
            accumulator.add(replica)
        return loss

    def _loss(self, replicas: Sequence[Replica], microbatch: Microbatch) -> Tensor:
        args, kwargs, target = microbatch
        return check_loss(self.loss_fn(_through([r.call for r in replicas], args, kwargs), target))

    @contextlib.contextmanager
    def _newer_weights(self, group: int) -> Iterator[None]:
        """Inside, the replicas that the forward read hold weights that are `mismatch` updates newer.

        Written through `.data`, which autograd's version check does not see: this is the very thing an engine
        without weight stashing does.
        """
        changed = [
            (versions.replica(group), versions.replica(group + lag))
            for versions, lag in zip(self._versions, self.mismatches, strict=True)
            if versions.replica(group) is not versions.replica(group + lag)
        ]
        kept = [[w.clone() for w in replica.weights] for replica, _ in changed]
        for replica, newer in changed:
            for parameter, weight in zip(replica.parameters, newer.weights, strict=True):
                parameter.data.copy_(weight)
        try:
            yield
        finally:
            for (replica, _), weights in zip(changed, kept, strict=True):
                for parameter, weight in zip(replica.parameters, weights, strict=True):
                    parameter.data.copy_(weight)

    def eval(
        self,
        x: Any,
        y: Any = None,
        *,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> list[Tensor] | list[Any]:
        """Losses (or, with no target, outputs) of the m microbatches (of all as one, where they are fused) at the
        master, without gradients."""
        y = _one_target(y, target)
        if return_outputs and y is not None:
            raise UserError(
                "The Emulator's eval returns outputs where it is given no target: leave that out."
            )
        self.drain()
        results: list[Any] = []
        with torch.no_grad(), evaluating(self._module):
            parts = self._options.cut(_flat((x,)), kwargs, y)
            for args, options, target in [joined(parts)] if self._fuse else parts:
                output = _through([versions.master.call for versions in self._versions], args, options)
                results.append(output if target is None else self.loss_fn(output, target).detach())
        if y is None:
            return [merged(results)]
        if losses is not None:
            losses[:] = results
        return results

    def drain(self) -> None:
        """Finish the pending update, so that `master` is the newest weights."""
        refuse_in_hook(self._updater.in_hook)
        self._updater.finish_all()

    def capture(self) -> states.State:
        """The state after the last update, as live tensors: clone or copy them before the next step. In `after_update`:
        at the boundary just reached."""
        if not self._updater.in_hook:
            self.drain()
        return states.capture(self._updater)

    # What a loop asks of a stage of a pipeline, so that one loop drives either.

    busy_seconds = math.nan  # one process waits for no other

    def stopping(self) -> bool:
        """Whether a stop was requested."""
        return self._updater.status.stop

    def trace(self, on: bool) -> None:
        """Nothing is recorded: there is no pipeline to draw."""

    def take_trace(self) -> list[Span]:
        """No spans, as none are recorded."""
        return []


def _cutovers(
    given: GivenCutover | Sequence[int],
    delays: Sequence[int],
    microbatches: int,
    flushed: Callable[[int], bool],
) -> list[Cutover]:
    """The cutover of each stage; one without delay has nothing old."""
    values = list(given) if isinstance(given, Sequence) else [given] * len(delays)
    if len(values) != len(delays):
        raise UserError(f"cutover={given!r}: give one, or one for each of the {len(delays)} stages.")
    return [
        Cutover(microbatches, (microbatches if value is None else value) if late else 0, flushed)
        for value, late in zip(values, delays, strict=True)
    ]


def _check_cutover(
    cutovers: Sequence[Cutover],
    given: object,
    delays: Sequence[int],
    mismatches: Sequence[int],
    correction: Correction,
) -> None:
    if given is not None and (set(delays) != {1} or any(mismatches)):
        raise UserError(
            f"cutover={given!r} is of PipeDream-2BW, where every stage is one update late: it does not go with "
            f"delay={list(delays)} and mismatch={list(mismatches)}. Drop it, or those."
        )
    if any(cutover.mixed for cutover in cutovers):
        check_mixed(correction)


def _one_target(y: Any, target: Any) -> Any:
    if y is not None and target is not None:
        raise UserError("Give the target once: step(x, y), or step(x, target=y).")
    return target if y is None else y


def _flat(args: tuple) -> tuple:
    """`step((a, b), y)` passes a and b; `step(x, y)` passes x."""
    return args[0] if len(args) == 1 and isinstance(args[0], tuple) else args


def _through(calls: Sequence[Callable[..., Any]], args: tuple, kwargs: dict[str, Any]) -> Any:
    """What the chain of stages makes of a microbatch."""
    output = calls[0](*_flat(args), **kwargs)
    for call in calls[1:]:
        output = call(*output) if isinstance(output, tuple | list) else call(output)
    return output


def _per_stage(what: str, value: int | Sequence[int], count: int) -> list[int]:
    values = [value] * count if isinstance(value, int) else list(value)
    if len(values) != count or any(v < 0 for v in values):
        raise UserError(f"{what}={value!r}: give one number >= 0, or one for each of the {count} stages.")
    return values

"""Schedule2BW: one forward, one backward, for ever, and no flush.

Stage s runs w_s forwards once, then F_k, B_{k-w_s} without end. `step` hands in one group of m microbatches and
returns while its last ones are still in flight; `drain` lets them land. Which weights a microbatch reads is
`staleness.reads`, held by `Versions`: the first c of a group read the bank and the others the newest weights, for which
a stage lets the backwards of the group before go first, then waits for its update. With c >= w_0 + 1 there is nothing
left to let go and hardly anything to wait for; with c = 0 this is a flush. What an update does is `update.py`, advanced
between actions so that the norm, the reductions and the tied weights travel in the slack. Nothing here knows how a
tensor travels (`channel.py`, `in_stream.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from slipstream.distributed.groups import shares_gpus
from slipstream.errors import UserError
from slipstream.optim.corrections import Correction, build_correction, check_mixed
from slipstream.pipeline import state as states
from slipstream.pipeline.agreement import prefix_of
from slipstream.pipeline.checks import (
    check_covers,
    check_inputs,
    check_layers,
    check_pieces,
    evaluating,
    named_ties,
    optimizer_of,
    split_shared,
)
from slipstream.pipeline.compact import not_compact
from slipstream.pipeline.depth import Depth
from slipstream.pipeline.engine import Engine, Guard
from slipstream.pipeline.flight import Flight, Result
from slipstream.pipeline.links import Links
from slipstream.pipeline.mesh import peers_of
from slipstream.pipeline.microbatches import ChunkSpec, Microbatch, merged
from slipstream.pipeline.options import Options
from slipstream.pipeline.placement import Placement
from slipstream.pipeline.replica import Prepare, give_back, sum_gradients
from slipstream.pipeline.room import Room
from slipstream.pipeline.sharding import collapse, make_whole, materialised, refuse_lost, refuse_to_save
from slipstream.pipeline.torch_stage import read_stage
from slipstream.pipeline.trace import Trace
from slipstream.pipeline.update import Updater
from slipstream.pipeline.versions import Versions
from slipstream.schedule.actions import Kind
from slipstream.schedule.cutover import Cutover, GivenCutover, default_cutover
from slipstream.schedule.timeline import Span

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DEFAULT_TIMEOUT_SECONDS = 300.0


class Schedule2BW(Engine):
    """PipeDream-2BW over `torch.distributed.pipelining` stages, one stage per rank.

    It takes the place of a schedule of torch's and owns the optimizer, which `optimizer(module)` makes over the master.
    `step` hands in one group of `n_microbatches`, of which there must be at least as many as stages.
    """

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        correction: str | Correction = "error_feedback",
        max_grad_norm: float | None = None,
        *,
        synchronous: int | Callable[[int], bool] = 0,
        cutover: GivenCutover = None,
        in_flight: int | None = None,
        bank_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        tied: dict[str, str | Sequence[str]] | None = None,
        data_group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        shard_optimizer: bool = False,
        compact_master: bool | None = False,
        prepare: Prepare | None = None,
        replicas: Sequence[nn.Module] | None = None,
        args_chunk_spec: Sequence[ChunkSpec] | None = None,
        kwargs_chunk_spec: Mapping[str, ChunkSpec] | None = None,
        scale_grads: bool = True,
        data_reduction: str = "mean",
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self._stage = read_stage(stage)
        last, count, module = self._stage.last, self._stage.count, self._stage.module
        options = Options(
            n_microbatches, loss_fn, optimizer, correction, max_grad_norm, synchronous, bank_dtype, gradient_dtype,
            prepare, replicas, scale_grads, data_reduction, args_chunk_spec, kwargs_chunk_spec, last, count,
        )  # fmt: skip
        options.check_module(module)
        check_layers(module)
        self._options = options
        self.n_microbatches = n_microbatches
        self.loss_fn = loss_fn
        correction = build_correction(correction)
        on_host = self._stage.device.type == "cpu"
        if cutover is None:
            usual = default_cutover(count, n_microbatches, on_host)
            cutover = n_microbatches if correction.corrects_gradient else usual
        self._cutover = Cutover(n_microbatches, cutover, options.flushed)
        if self._cutover.mixed:
            check_mixed(correction)
        self._depth = Depth(self._stage.index, count, n_microbatches, in_flight, on_host, self._cutover)
        ties = named_ties(tied, split_shared(module), module, self._stage.index)
        self._versions = Versions(
            module,
            self._cutover,
            looks_ahead=correction.looks_ahead,
            bank_dtype=bank_dtype,
            prepare=prepare,
            ready=replicas,
            parks=not correction.corrects_gradient,
        )
        if data_reduction == "sum":
            for replica in self._versions.replicas:
                sum_gradients(replica.shards)
        self._peers, rows = peers_of(
            self._stage, self._versions, ties, mesh, data_group,
            settings=options.of_all_ranks(correction.name) | {"in_flight": in_flight}, shard_optimizer=shard_optimizer,
            summed=data_reduction == "sum", gradient_dtype=gradient_dtype, timeout_seconds=timeout,
        )  # fmt: skip
        if self._peers.names_repeat:
            self._versions.prefix = prefix_of(self._stage.index)
        self._links = Links(
            self._stage, self._peers.groups, warm_up_behind=lambda: self._depth.warm_up_behind,
            lead=lambda: self._depth.lead, timeout_seconds=timeout,
        )  # fmt: skip
        try:
            if self._links.attendant is not None:
                self._peers.attend(self._links.attendant)
            self._begin(options, correction, rows, shard_optimizer, compact_master)
        except BaseException:  # no one gets a schedule to close
            self._links.close()
            self._peers.close()
            if self._peers.groups is not None:
                self._peers.groups.close(failed=True)
            raise

    def _begin(
        self,
        options: Options,
        correction: Correction,
        rows: Sequence[Placement],
        shard_optimizer: bool,
        compact_master: bool | None,
    ) -> None:
        """With the others: the first weights, the optimizer over what this rank has of the master, the loop's parts."""
        module = self._stage.module
        assert options.optimizer is not None
        self._peers.broadcast_initial(self._versions.master.weights)
        self._versions.spread()
        if shard_optimizer:
            self._versions.owned = self._peers.owned
            collapse(self._versions, self._peers.owned)
        self.optimizer = optimizer_of(options.optimizer, module)
        owned = [(self._versions.names[i], self._versions.master.parameters[i]) for i in self._versions.owned]
        check_covers(self.optimizer, module, dict(owned))
        check_pieces(correction, rows)
        if compact_master is not False:
            self._make_compact(correction, needed=compact_master is True)
        if self._versions.partial:
            refuse_to_save(self._versions)
        self._updater = Updater([self._versions], self.optimizer, correction, options.clips_at, self._peers)
        self._updater.wait_for = self._links.wait_for
        self._trace = Trace(self._stage.index, self._stage.device)
        self._updater.timing = lambda group: self._trace.action(Kind.UPDATE, group, version=group + 1)
        groups = self._peers.groups
        if self._depth.is_open and groups is not None:
            self._depth.room = Room(self._stage.device, groups.kind != "nccl" or shares_gpus())
        self._flight = Flight(
            self._stage, options, self._versions, self._links, self._updater, self._depth, self._trace,
            self._loss,
        )  # fmt: skip
        self._guarded = Guard(self._stage.index, lambda: self._updater.in_hook)
        self.group = 0

    def _make_compact(self, correction: Correction, needed: bool) -> None:
        versions, mixed = self._versions, self._cutover.mixed
        why = not_compact(versions.master, versions.replicas, self.optimizer, mixed, correction.on_pieces)
        if why is None:
            versions.make_compact()
        elif needed:
            raise UserError(f"compact_master: {why}")

    # The loop ---------------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hand in one group: the inputs on the first stage, the target on the last, nothing in between.

        Returns without flushing. `losses` is filled, on the last stage, with the losses of this group's microbatches,
        taken at the bank; `loss_kwargs` go to loss_fn. The last stage returns its outputs: all of a group's at once,
        so a model with a large vocabulary sets `return_outputs=False`. `arg_mbs`, `kwarg_mbs` and `target_mbs` are
        lists of microbatches in the place of whole batches.
        """
        group = self.group
        microbatches = self._cut(args, kwargs, target, losses, (arg_mbs, kwarg_mbs, target_mbs))
        self._flight.loss_kwargs = loss_kwargs or {}
        with self._guarded():
            self._links.begin_group()
            cutover = self._cutover(group)
            if cutover == 0:
                self._flight.await_weights(group, 0)
            self._updater.enter(group)
            self._flight.await_weights(group, 0)
            self._depth.adapt(group, self._updater.statuses)
            self._flight.fit()
            results = []
            for index, microbatch in enumerate(microbatches):
                if 0 < index == cutover:
                    self._flight.await_weights(group, index)
                results.append(self._flight.forward(group, index, microbatch, return_outputs))
                full = len(self._flight) > self._depth.warm_up
                self._updater.advance(crowded=full)
                if full:
                    self._flight.backward()
            self.group += 1
        return self._results(results, losses, return_outputs)

    def drain(self) -> None:
        """Let everything in flight land and finish every update. The next group still reads its own bank."""
        with self._guarded():
            self._flight.land()
            self._updater.finish_all()
            self._links.finish_sends()
            self._trace.pause()

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """A forward pass at the master, without gradients, of as many microbatches as a group has.

        The last stage fills `losses` if it has a target, and returns its outputs unless told not to.
        """
        microbatches = self._cut(args, kwargs, target, losses, (arg_mbs, kwarg_mbs, target_mbs))
        self._flight.loss_kwargs = loss_kwargs or {}
        has_target = target is not None or target_mbs is not None
        self.drain()
        with self._guarded(), torch.no_grad(), self.gathered_master() as module, evaluating(module):
            results = self._flight.evaluate(microbatches, has_target, return_outputs)
        return self._results(results, losses, return_outputs)

    def _loss(self, output: Any, target: Any, **kwargs: Any) -> Tensor:
        assert self.loss_fn is not None
        return self.loss_fn(output, target, **kwargs)

    def _results(self, results: list[Result], losses: list[Tensor] | None, return_outputs: bool) -> Any:
        if not self._stage.last:
            return None
        if losses is not None:
            losses.clear()
            losses.extend(loss for loss, _ in results if loss is not None)
        return merged([output for _, output in results]) if return_outputs else None

    # State ------------------------------------------------------------------------------------------------

    @property
    def master(self) -> nn.Module:
        """The module with the newest weights this stage has (call `drain` for those of every group handed in)."""
        refuse_lost(self._versions)
        if self._versions.partial:
            raise UserError(
                "No rank holds the whole master: the optimizer is sharded, or the master compact. Use `with "
                "schedule.gathered_master() as module`, on all ranks together."
            )
        return self._versions.module

    @contextlib.contextmanager
    def gathered_master(self) -> Iterator[nn.Module]:
        """The whole master, gathered from its owners where the optimizer is sharded and put together where it is
        compact: on all ranks together, as it drains (an update that is under way on one data rank would take its gather
        for that of another's bank)."""
        partial = self._versions.partial  # not inside another of these
        if partial:
            self.drain()
            self._updater.await_copies()  # a compact master's halves give their memory to it
        try:
            with materialised(self._versions, self._peers) if partial else contextlib.nullcontext():
                yield self._versions.module
        finally:
            give_back(self._versions.master.shards)  # a forward may have left it whole, and soon stale

    def _whole_master(self) -> contextlib.AbstractContextManager[nn.Module]:
        return self.gathered_master()

    def capture(self) -> states.State:
        """The state at the boundary this stage has reached, without draining: for `after_update`. Its tensors are the
        live ones: copy what is to be kept (`cloned_state`) before `after_update` returns, or `hold` them. A bank gives
        its memory back once its group has read it."""
        return states.capture(self._updater)

    def load_state_dict(self, state: states.State) -> None:
        super().load_state_dict(state)
        self._depth.begin_again()

    @property
    def cutover(self) -> Callable[[int], int]:
        """How many microbatches of a group read the bank; the others read the newest weights."""
        return self._cutover

    @property
    def in_flight(self) -> int:
        """Microbatches this stage keeps between forward and backward."""
        return self._depth.warm_up + 1

    @property
    def settled(self) -> bool:
        """Whether `in_flight` is chosen and will not change: the same answer for the same group on every rank."""
        return not self._depth.is_open

    @property
    def busy_seconds(self) -> float:
        """Time spent computing since the start."""
        return self._trace.busy_seconds

    def stopping(self) -> bool:
        """Whether to hand in no further group: the same answer for the same group on every rank.

        Waits for the update of two groups ago, which the next step would wait for anyway.
        """
        with self._guarded():
            self._updater.finish(self.group - 2)
        return any(told.stop for group, told in self._updater.statuses.items() if group <= self.group - 2)

    def trace(self, on: bool) -> None:
        """Record what this stage does and when."""
        self._trace.on = on

    def take_trace(self) -> list[Span]:
        """The spans recorded since the last call."""
        return self._trace.take()

    def close(self) -> None:
        """Give back process groups, threads, sockets, shared memory and banks, on all ranks together.

        What is in flight lands first, unless the schedule failed. The master stays the user's module.
        """
        if self._guarded.closed:
            return
        failed = self._guarded.failed is not None
        if not failed:
            self.drain()
        self._flight.clear()
        with contextlib.suppress(RuntimeError) if failed else contextlib.nullcontext():  # of a lost device
            self._updater.await_copies()
            make_whole(self._versions)
        self._guarded.closed = True
        self._links.close()
        self._give_back(failed)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._guarded.fail(error)
        self.close()

    def _cut(
        self, args: tuple, kwargs: dict[str, Any], target: Any, losses: Any, mbs: tuple[Any, Any, Any]
    ) -> list[Microbatch]:
        if self._guarded.failed is None:
            has_target = any(given is not None for given in (target, losses, mbs[2]))
            check_inputs(self._stage, args or mbs[0], kwargs or mbs[1], has_target)
        return self._options.cut(args, kwargs, target, *mbs)

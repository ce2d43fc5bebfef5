"""Torch's own synchronous schedules with our update, as the training loop drives them.

The forwards and backwards are torch's classes; the update is the engine's (`pipeline/update.py`, delay 0):

    z_{g+1} = Optimizer(z_g, state, G_g),   G_g the mean gradient at z_g

The loss is divided by m before the backward, as the engine does, and where the banks are narrower than the master each
microbatch's gradient is added to a wide sum, so the gradients are those of `delay=0` in the emulator, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from slipstream.config import Config
from slipstream.distributed import World
from slipstream.errors import UserError
from slipstream.optim.corrections import build_correction
from slipstream.pipeline import state as states
from slipstream.pipeline.checks import split_shared
from slipstream.pipeline.engine import Engine
from slipstream.pipeline.gradients import Accumulator
from slipstream.pipeline.mesh import Mesh
from slipstream.pipeline.peers import Peers
from slipstream.pipeline.placement import grid_of, place
from slipstream.pipeline.replica import Replica
from slipstream.pipeline.stage_graphs import Loss, RecordedCall
from slipstream.pipeline.update import Updater
from slipstream.pipeline.versions import Versions
from slipstream.pipeline.watched_stage import TorchTrace, WatchedStage
from slipstream.schedule.cutover import Cutover, always
from slipstream.schedule.timeline import Span
from slipstream.train import build
from slipstream.train.engine import mesh_groups
from slipstream.train.own_model import OwnModel

_TORCH: dict[str, Callable[..., Any]] = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


class Synchronous(Engine):
    """One rank of a flushed pipeline; it holds one stage module, or two (interleaved, V-shaped)."""

    def __init__(self, config: Config, model: build.Model, world: World, device: torch.device) -> None:
        pipeline = config.pipeline
        rank, _ = world.mesh(config.stages)
        count = config.stages * config.chunks
        indices = held_by(pipeline.schedule, rank, config.stages)
        self._m = pipeline.microbatches
        modules = build.stage_modules(config, model, count, indices, device)
        if not isinstance(model, OwnModel):
            for module in modules:  # tied weights are tensors of their own at every depth; `_ties` joins them
                split_shared(module)
        group, data_group = mesh_groups(world, config.stages)
        bank_dtype = torch.bfloat16 if config.train.dtype == "bfloat16" else None
        nothing_old = Cutover(self._m, 0, always)
        self._versions = [
            Versions(m, nothing_old, delay=0, bank_dtype=bank_dtype, prepare=build.preparation(config))
            for m in modules
        ]
        self._accumulators = [Accumulator(versions.master) for versions in self._versions]
        names = [name for versions in self._versions for name in versions.names]
        ties = _ties(model, names)
        parameters = [p for versions in self._versions for p in versions.master.parameters]
        if world.size == 1:
            peers = Peers(len(names), list(ties.values()))
        else:
            by_name = dict(zip(names, parameters, strict=True))
            grid = grid_of(by_name, None, data_group)
            peers = Mesh(
                parameters, ties, place(modules, by_name, grid), grid, stage=rank, stages=config.stages, group=group,
                data_group=data_group, device=device, timeout_seconds=config.train.timeout_seconds,
            )  # fmt: skip
        self.optimizer = build.optimizer_factory(config)(nn.ModuleList(modules))
        self._updater = Updater(
            self._versions,
            self.optimizer,
            build_correction("none"),
            config.optim.max_grad_norm or None,
            peers,
        )
        self._trace = TorchTrace(indices[0], rank, device)
        self._updater.timing = self._trace.update
        # The gradients of every microbatch are added to the wide sum as soon as torch has made them.
        self._stages = [
            WatchedStage(
                _as_module(versions.replica(0)),
                index,
                count,
                device,
                group,
                trace=self._trace,
                collect=partial(accumulator.add, versions.replica(0)),
                prepare=self._aim if index == count - 1 else None,
            )
            for versions, accumulator, index in zip(self._versions, self._accumulators, indices, strict=True)
        ]
        self._loss = build.loss_function(config)
        # A last stage that is recorded gets its loss recorded with it, as in our own engine.
        self._last = next((stage.submod for stage in self._stages if stage.is_last), None)
        self._targets: Sequence[Tensor] = ()
        placed = {
            index: other
            for other in range(config.stages)
            for index in held_by(pipeline.schedule, other, config.stages)
        }
        ranks = dist.get_process_group_ranks(group)
        self._owners, self._pipeline = [ranks[placed[index]] for index in range(count)], group
        rows = pipeline.microbatch_size // pipeline.data_ranks
        if isinstance(model, OwnModel):
            self._hidden = [(rows, *shape) for shape in model.hidden(count, pipeline.boundaries)]
        else:
            self._hidden = [(rows, config.data.sequence, model.dim)] * (count - 1)
        self._documents = not isinstance(model, OwnModel) and model.document_mask
        self._schedule = _TORCH[pipeline.schedule](
            self._stages if config.chunks > 1 else self._stages[0],
            self._m,
            loss_fn=self._trace.with_loss(self._loss_of),
            scale_grads=False,
        )
        self.group = 0

    @property
    def busy_seconds(self) -> float:
        return self._trace.busy_seconds

    def step(self, *args: Tensor, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """As the step of torch's schedule, and the update after it."""
        self._updater.enter(self.group)
        self._trace.group = self.group
        if isinstance(self._last, _Called) and self._last.recorded and kwargs.get("target") is not None:
            self._targets = kwargs["target"].tensor_split(self._m)
        outputs = self._schedule.step(*args, losses=losses, **kwargs)
        self._targets = ()
        if losses is not None:
            losses[:] = [loss.detach() * self._m for loss in losses]
        grads = [
            grad
            for versions, accumulator in zip(self._versions, self._accumulators, strict=True)
            for grad in accumulator.take(versions.replica(self.group))
        ]
        self._updater.begin(self.group, grads)
        self._updater.finish_all()
        self.group += 1
        return outputs

    def _aim(self, microbatch: int) -> None:
        """Before the last stage's forward of a microbatch: what its loss needs, where that is recorded with it."""
        if self._targets:
            assert isinstance(self._last, _Called)
            self._last.joined = self._loss, self._targets[microbatch]

    def _loss_of(self, output: Any, target: Any) -> Tensor:
        """The share of a microbatch, whose forward has just run."""
        joined = self._last.loss if isinstance(self._last, _Called) else None
        return (self._loss(output, target) if joined is None else joined) / self._m

    def eval(
        self,
        x: Tensor | None = None,
        *,
        target: Tensor | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = False,
    ) -> None:
        """Forwards at the master, from stage to stage. Torch's own `eval` reads the banks, and its V-shaped schedule
        keeps its backward actions in it and fails on them."""
        assert not return_outputs, "a group's logits would fill a GPU"
        inputs = list(x.chunk(self._m)) if x is not None else []
        targets = list(target.chunk(self._m)) if target is not None else []
        held, owners, top = [stage.stage_index for stage in self._stages], self._owners, len(self._owners) - 1
        made_here: list[tuple[Tensor, ...]] = []
        sent: list[tuple[Tensor, dist.Work | None]] = []  # kept until they have left
        with torch.no_grad():
            for index, versions in zip(held, self._versions, strict=True):
                versions.module.eval()
                for k in range(self._m):
                    given = (inputs[k],) if index == 0 else self._received(owners, index, made_here, k)
                    out: Any = versions.master.call(*given)
                    if index == top:
                        if losses is not None:
                            losses.append(self._loss(out, targets[k]))
                        continue
                    hidden, *documents = made = out if isinstance(out, tuple) else (out,)
                    if owners[index + 1] == owners[index]:
                        made_here.append(made)
                        continue
                    for message in (hidden.float(), *documents):
                        sent.append((message, dist.isend(message, owners[index + 1], self._pipeline)))
                versions.module.train()
        for _, work in sent:
            if work is not None:
                work.wait()

    def _received(
        self, owners: list[int], index: int, made_here: list[tuple[Tensor, ...]], k: int
    ) -> list[Tensor]:
        """Microbatch k as the stage before `index` left it: the hidden state, and document numbers if there are any."""
        if owners[index - 1] == owners[index]:
            return list(made_here[k])
        shape, device = self._hidden[index - 1], self._stages[0].device
        received = [torch.empty(shape, device=device)]
        if self._documents:
            received.append(torch.empty(shape[:2], dtype=torch.int64, device=device))
        for message in received:
            dist.recv(message, owners[index - 1], group=self._pipeline)
        return received

    def drain(self) -> None:
        """Nothing is ever in flight between two steps."""

    def capture(self) -> dict[str, Any]:
        return states.capture(self._updater) | {"banks": {}}  # the banks are the master

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {"banks": {states.bank_name(0): state["master"]}, "published": {}})

    def trace(self, on: bool) -> None:
        self._trace.on = on

    def take_trace(self) -> list[Span]:
        return self._trace.take()

    def stopping(self) -> bool:
        known = self._updater.statuses.get(self.group - 1)
        return known is not None and known.stop


def held_by(schedule: str, rank: int, stages: int) -> list[int]:
    """The stage modules of a rank: one, two in turn, or the two arms of a V."""
    if schedule == "interleaved_1f1b":
        return [rank, rank + stages]
    if schedule == "zbv":
        return [rank, 2 * stages - 1 - rank]
    return [rank]


def _ties(model: build.Model, names: list[str]) -> dict[str, list[int]]:
    if isinstance(model, OwnModel):
        if model.ties:
            raise UserError(
                f"'{model.place}' uses {model.ties[0][0]} twice, which only pipeline.schedule=2bw and emulate can keep "
                "equal for a model of your own."
            )
        return {}
    held = [names.index(name) for name in ("embedding.weight", "head.weight") if name in names]
    return {"embedding": held} if model.tied and held else {}


class _Called(nn.Module):
    """A prepared replica (under autocast, say) as the module torch's stage asks for.

    It has the replica's parameters, which torch's zero-bubble schedules look for in it.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self.module = replica.module
        self._call = replica.call
        # Of the next forward's output, and its target.
        self.joined: tuple[Loss, Tensor] | None = None
        self.loss: Tensor | None = None  # of the last forward, if it was to compute it
        # What it returns then: of the shape that torch expects, without memory.
        self._output: Tensor | None = None

    @property
    def recorded(self) -> bool:
        return isinstance(self._call, RecordedCall)

    def forward(self, *args: Any) -> Any:
        joined, self.joined, self.loss = self.joined, None, None
        if joined is not None and self._output is not None and isinstance(self._call, RecordedCall):
            loss, target = joined
            self.loss = self._call.with_loss(loss)(*args, target)
            return self._output
        output = self._call(*args)
        if isinstance(output, Tensor):
            self._output = torch.empty_like(output, device="meta")
        return output


def _as_module(replica: Replica) -> nn.Module:
    return replica.call if isinstance(replica.call, nn.Module) else _Called(replica)

"""The training loop, top to bottom. Update g is step g + 1.

Losses, norms and checkpoints of a group come when they come (`reporter.py`, `writer.py`), and nothing in the loop waits
for another rank except where the pipeline is drained.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.config import Config
from slipstream.errors import CheckpointError, HealthError, StageError
from slipstream.metrics.progress import Show
from slipstream.metrics.record import Recorder
from slipstream.train import batches, checkpoint, health, in_memory
from slipstream.train.board import Board
from slipstream.train.build import Model
from slipstream.train.engine import RunEngine, losses_of
from slipstream.train.evaluate import validate
from slipstream.train.reporter import Position, Reporter
from slipstream.train.sources import Dataset
from slipstream.train.state import Copier
from slipstream.train.timeline import Profiling, Tracing, recorded_from, sizes_of
from slipstream.train.writer import Writer

WEIGHTS_SECONDS = 30.0  # how long a rank of a failed run waits to hear of the others' weights


@dataclass(frozen=True)
class RunParts:
    """Everything the loop uses, made in `assemble.py`."""

    config: Config  # as the run is in this stretch
    end: int  # the step at which it ends
    model: Model
    position: Position
    engine: RunEngine
    board: Board
    train_data: Dataset
    valid_data: Dataset
    share: batches.Share
    device: torch.device
    learning_rate: Callable[[int], float]
    reporter: Reporter
    writer: Writer
    memory: Writer | None  # of checkpoints in memory, if there are any
    monitor: health.Monitor
    best: health.Best
    recorder: Recorder | None  # the leader's, as is `show`
    show: Show | None
    meta: dict[str, Any]  # what every checkpoint says of its run
    root: Path  # of the checkpoints
    tied: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How a stretch of training ended: "finished", "signal" (saved, to be resumed), "rollback", or "recut" (saved, to
    go on with its updates cut otherwise)."""

    step: int
    reason: str
    validation_loss: float | None = None
    failed_at: int | None = None  # of a rollback: the step that asked for it


def train(
    parts: RunParts, step: int, data_offset: int, asked: threading.Event, *, validate_first: bool = False
) -> Outcome:
    """Train from `step` to the end of the stretch, or until a stop is asked for and saved."""
    config, engine, reporter = parts.config, parts.engine, parts.reporter
    total, eval_every = config.train.steps, config.train.eval_every
    saver = _Saver(parts, data_offset, step)
    engine.after_update = saver.after_update
    sizes = sizes_of(parts.model, config)
    profiling = Profiling(Path(config.run.dir), parts.position.rank, config.train.profile, sizes)
    at = recorded_from(config, on_gpu=parts.device.type == "cuda")
    tracing = Tracing(engine, parts.board, parts.recorder, parts.position, at)
    reporter.start(step)
    ended_early = False
    if validate_first:
        ended_early = _validated(parts, saver, step)
        reporter.start(step)
    with batches.ahead(parts.train_data, parts.share, step + data_offset) as loader:
        while step < parts.end and not ended_early:
            if asked.is_set() or reporter.stop_asked or parts.monitor.failed_at is not None:
                engine.request_stop()
            if engine.stopping():
                break
            tracing.before(step)
            profiling.before(step)
            submit(parts, step, loader.get(step + data_offset))
            step += 1
            saver.check_hashes()
            if eval_every and step % eval_every == 0 and step < total:
                ended_early = _validated(parts, saver, step)
                reporter.start(step)
        engine.drain()
        reporter.poll(finish=True)
        saver.check_hashes(finish=True)
        tracing.finish()
        profiling.finish()
        stopped = asked.is_set() or reporter.stop_asked
        reason = "finished" if step == total or ended_early else _agree_on_reason(parts, step, stopped)
        if reason == "recut":
            saver.hand_over(step)
        elif reason != "rollback":
            saver.save(step)
        loss = None
        if reason == "finished":
            loss = _validate(parts, step, silently=ended_early)
            if not ended_early and parts.best.see(step, loss) and config.checkpoint.best:
                saver.keep_best(step)  # that state was saved before its loss was known
        parts.writer.finish()
        if parts.memory is not None:
            try:
                parts.memory.finish()
            except CheckpointError:  # it was said when it failed
                if reason == "recut" and not config.checkpoint.keep:
                    raise
        if parts.position.leader and reason not in ("rollback", "recut"):
            in_memory.forget(Path(config.run.dir))  # the disk has a newer one, or there is to be none
    return Outcome(step, reason, loss, parts.monitor.failed_at if reason == "rollback" else None)


def submit(parts: RunParts, step: int, batch: batches.Batch) -> None:
    """Hand in the group after `step` updates, and report what has arrived of earlier ones."""
    engine, scale = parts.engine, parts.learning_rate(step)
    for group in engine.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * scale
    losses = losses_of(engine.step, batch.to(parts.device))
    parts.reporter.submitted(step + 1, engine.optimizer.param_groups[0]["lr"], losses)
    parts.reporter.poll()


def _validate(parts: RunParts, step: int, *, silently: bool = False) -> float:
    """Validation at the master; the trajectory does not notice. `silently`: it is on record already."""
    parts.engine.drain()
    parts.reporter.poll(finish=True)
    train = parts.config.train
    loss = validate(
        parts.engine, parts.valid_data, train.eval_batches, parts.share, parts.device, parts.board, step
    )
    if silently:
        return loss
    if parts.recorder is not None:
        parts.recorder.write("validation", step, loss=loss, tokens=step * parts.config.tokens_per_step)
    if parts.show is not None:
        parts.show.note(f"step {step}  validation loss {loss:.4f}")
    return loss


def _validated(parts: RunParts, saver: _Saver, step: int) -> bool:
    """Validate inside a run; whether it has waited long enough for a better loss."""
    patience = parts.config.train.patience
    if parts.best.see(step, _validate(parts, step)):
        if parts.config.checkpoint.best:
            saver.keep_best(step)
    elif patience and parts.best.since >= patience:
        if parts.show is not None:
            parts.show.note(
                f"Stopping early: none of the last {parts.best.since} validations was better than "
                f"{parts.best.loss:.4f} at step {parts.best.step}."
            )
        return True
    return False


class _Saver:
    """What happens at update boundaries, on each rank when it passes them: snapshots and hashes."""

    def __init__(self, parts: RunParts, data_offset: int, step: int) -> None:
        self._parts = parts
        self._meta = parts.meta | {"data_offset": data_offset}
        self._saved = step
        self._copier = Copier(parts.device)
        self._hashed: list[int] = []

    def after_update(self, group: int) -> None:
        step, config = group + 1, self._parts.config
        if config.checkpoint.every and step % config.checkpoint.every == 0:
            self.save(step)
        elif config.checkpoint.memory_every and step % config.checkpoint.memory_every == 0:
            self._submit(step, self._parts.memory)
        comparable = self._parts.position.data_ranks > 1 or bool(self._parts.tied)
        if comparable and config.health.hash_every and step % config.health.hash_every == 0:
            sums = health.fingerprint(
                self._parts.engine.capture(), self._parts.tied, one_age=not config.uneven
            )
            self._parts.board.post(f"hash/{step}/{self._parts.position.rank}", sums)
            self._hashed.append(step)

    def save(self, step: int) -> None:
        """Snapshot now, write later; once per step."""
        if step == self._saved or not self._parts.config.checkpoint.keep:
            return
        self._saved = step
        self._submit(step, self._parts.writer)

    def hand_over(self, step: int) -> None:
        """A snapshot for the next stretch: in memory where a run keeps none on disk."""
        if self._parts.config.checkpoint.keep:
            self.save(step)
        else:
            self._submit(step, self._parts.memory)

    def _submit(self, step: int, writer: Writer | None) -> None:
        assert writer is not None
        if self._parts.position.data_rank == 0 or self._parts.config.pipeline.shard_optimizer:
            snapshot = self._copier.copy(self._parts.engine.capture())
            if snapshot.copied is not None:
                self._parts.engine.hold(snapshot.copied)
            writer.submit(step, snapshot, self._meta, self._parts.reporter.poll)

    def keep_best(self, step: int) -> None:
        """Save the state of `step`; `checkpoints/best` is to lead to it. A checkpoint that is still to be committed is
        linked then (`assemble.py`), one that was committed before its loss was known, here."""
        self.save(step)
        saved = checkpoint.folder_of(self._parts.root, step)
        if self._parts.position.leader and saved.exists():
            checkpoint.point_at(saved)

    def check_hashes(self, *, finish: bool = False) -> None:
        """The leader compares what all ranks posted, when they have; a difference ends the run by name."""
        if not self._parts.position.leader:
            return
        while self._hashed:
            step, position = self._hashed[0], self._parts.position
            keys = [f"hash/{step}/{rank}" for rank in range(position.ranks)]
            found = self._parts.board.wait(*keys) if finish else self._parts.board.read(*keys)
            if found is None:
                return
            self._hashed.pop(0)
            problem = health.divergence(
                dict(enumerate(found)),
                position.stages,
                step,
                replicated=not self._parts.config.pipeline.shard_optimizer,
            )
            if problem is not None:
                raise StageError(problem)


def _agree_on_reason(parts: RunParts, step: int, stopped: bool) -> str:
    """All ranks stopped at the same step; the leader says why. `stopped`: this rank was asked to."""
    if parts.position.leader:
        with contextlib.suppress(CheckpointError):  # reported already
            parts.writer.finish()  # the checkpoint to go back to may still be on its way to the disk
        if parts.monitor.failed_at is None:
            reason = "recut" if step == parts.end and not stopped else "signal"
        elif parts.config.health.rollback and checkpoint.committed(parts.root):
            reason = "rollback"
        else:
            reason = "failure"
        parts.board.post(f"stop/{step}", reason)
    (reason,) = parts.board.wait(f"stop/{step}")
    if reason == "failure":
        raise HealthError(
            f"{parts.monitor.failure} Stopped at step {step}. {_state_of_weights(parts, step)} Lower optim.lr, raise "
            "optim.warmup, or set health.rollback=true (it needs a checkpoint) to go back and skip the data."
        )
    return reason


def _state_of_weights(parts: RunParts, step: int) -> str:
    """Whether the weights are damaged, after all ranks agreed on a failure: each of them looks, and tells the others.

    A rank that cannot look says so, and one that is not heard of in time holds nobody up: whatever goes wrong here, it
    must not stand in the place of the failure itself.
    """
    rank, ranks = parts.position.rank, parts.position.ranks
    own = None
    with contextlib.suppress(Exception):  # a device without room, say
        own = health.damaged(parts.engine.capture())
    found: dict[int, list[str] | None] = {rank: own}
    with contextlib.suppress(Exception):
        parts.board.post(f"damaged/{step}/{rank}", own)
        keys = {f"damaged/{step}/{other}": other for other in range(ranks) if other != rank}
        found |= {keys[key]: told for key, told in parts.board.heard(keys, WEIGHTS_SECONDS).items()}
    return health.state_of_weights(found, ranks, skipped=parts.monitor.skipped)

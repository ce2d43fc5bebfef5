"""From a config to a finished run: start the ranks, agree on what to do, train, say what was made.

The same `run_rank` serves the workers this command starts, torchrun's ranks, and the one process of the
emulator. Rank 0 is the leader: it alone decides (`folder.plan`), writes events and commits checkpoints.
"""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from slipstream.config import Config, from_tree, resolve
from slipstream.distributed import (
    Partitions,
    World,
    initialise,
    launch,
    partitioned,
    started_by_torchrun,
)
from slipstream.errors import UserError
from slipstream.train import build, closing
from slipstream.train import folder as folders
from slipstream.train.assemble import assemble, seat_of
from slipstream.train.board import Board, LocalBoard, SharedBoard
from slipstream.train.folder import Plan
from slipstream.train.reporter import Seat
from slipstream.train.trainer import Outcome, train


def start(config: Config) -> None:
    """`slipstream train`: in this process (emulate), as one of torchrun's ranks, or on ranks started here."""
    config = build.adopt_shape(config)
    if started_by_torchrun() and config.pipeline.schedule != "emulate":
        if config.pipeline.partitions:
            raise UserError("pipeline.partitions needs ranks that slipstream starts itself. Drop torchrun.")
        with initialise(timeout_seconds=config.train.timeout_seconds) as world:
            run_rank(world, resolve(config, world=world.size).model_dump())
        return
    config = resolve(config)
    build.device(config)  # a wrong device or data is said here once, before ranks start
    build.datasets(config, build.data_folder(config))
    if config.pipeline.schedule == "emulate":
        run_rank(None, config.model_dump())
        return
    assert config.pipeline.stages is not None
    nproc = config.pipeline.stages * config.pipeline.data_ranks
    with ExitStack() as stack:
        environment = None
        if config.pipeline.partitions:
            environment = stack.enter_context(_partitions(config, nproc)).environment
        job = "slipstream.train.session:run_rank"
        launch(job, nproc, (config.model_dump(),), on_signal=True, environment=environment)


def _partitions(config: Config, count: int) -> AbstractContextManager[Partitions]:
    if build.device(config).type != "cuda":
        raise UserError("pipeline.partitions cuts a GPU, and torch sees none. Set pipeline.partitions=false.")
    return partitioned(count)


def run_rank(world: World | None, tree: dict[str, Any]) -> dict[str, Any]:
    """One rank from start to end; after a rollback it begins again with a new engine."""
    config = from_tree(tree)
    torch.set_num_threads(1)  # the bits of long sums depend on it
    board: Board = LocalBoard() if world is None else SharedBoard(world.store, config.train.timeout_seconds)
    seat = seat_of(config, world)
    data = build.data_folder(config)
    seen: int | None = None  # data groups used before a rollback; none of them is used again
    with ExitStack() as held:
        for attempt in itertools.count():
            own_board = board.under(f"attempt-{attempt}")
            if seat.leader and attempt == 0:
                _lock(config, own_board, held)
            plan = _agree_on_plan(config, seat, data, own_board, seen)
            if plan.finished:
                if seat.leader:
                    closing.say_finished(Path(config.run.dir), plan.step)
                return {"step": plan.step, "reason": "finished", "validation_loss": None}
            outcome = _attempt(config, world, seat, data, plan, own_board)
            if outcome.reason != "rollback":
                return dataclasses.asdict(outcome)
            seen = outcome.step + plan.data_offset
    raise AssertionError("unreachable")


def _attempt(
    config: Config, world: World | None, seat: Seat, data: Path, plan: Plan, board: Board
) -> Outcome:
    with assemble(config, world, seat, data, plan, board) as parts:
        outcome = train(parts, plan.step, plan.data_offset)
        closing.close(parts, outcome)
    return outcome


def _lock(config: Config, board: Board, held: ExitStack) -> None:
    try:
        held.enter_context(folders.lock(Path(config.run.dir)))
    except UserError as error:
        board.post("plan", {"error": str(error)})
        raise


def _agree_on_plan(config: Config, seat: Seat, data: Path, board: Board, seen: int | None) -> Plan:
    """The leader decides; the others take its word."""
    if seat.leader:
        try:
            train_data, _ = build.datasets(config, data)
            plan = folders.plan(Path(config.run.dir), config, train_data.fingerprint())
            if seen is not None:
                note = (
                    f"Rolled back to step {plan.step}; the data groups up to {seen - 1} are not used again."
                )
                plan = dataclasses.replace(plan, data_offset=seen - plan.step, notes=(*plan.notes, note))
        except UserError as error:
            board.post("plan", {"error": str(error)})
            raise
        board.post("plan", dataclasses.asdict(plan))
    (answer,) = board.wait("plan")
    if "error" in answer:
        raise UserError(answer["error"])
    return Plan(**answer)

"""One rank of a run from start to end: a worker of this command, torchrun's, or the one process of the emulator.

Rank 0 is the leader: it alone decides (`folder.plan`), writes events and commits checkpoints.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from slipstream.config import Config, from_tree
from slipstream.distributed import World, started_by_torchrun
from slipstream.distributed.launch import STOPS, Asked, after_the_end
from slipstream.errors import HealthError, UserError
from slipstream.train import checkpoint, closing, cutovers, in_memory, same_folder
from slipstream.train import folder as folders
from slipstream.train.assemble import assemble, position_of
from slipstream.train.board import Board, beating
from slipstream.train.claim import last_started
from slipstream.train.elastic import fitted
from slipstream.train.folder import Plan
from slipstream.train.health import Monitor
from slipstream.train.remote import remote_of
from slipstream.train.reporter import Position
from slipstream.train.sources import data_folder, datasets
from slipstream.train.trainer import Outcome, train

SECOND_SECONDS = 1.0  # torchrun passes a terminal's Ctrl-C on as well: two at once are one request
MAX_FRUITLESS = 3  # rollbacks to the same checkpoint before a run gives up


def run_rank(
    world: World | None, tree: dict[str, Any], command: str = "", told: Asked | None = None
) -> dict[str, Any]:
    """One rank from start to end; after a rollback, and where updates are cut otherwise (`fine.py`), it begins again
    with a new engine.

    `command` is what the user typed, for the record; `told` hears of a stop that is asked for.
    """
    config = from_tree(tree)
    torch.set_num_threads(1)  # the bits of long sums depend on it
    board = Board(None if world is None else world.store, config.train.timeout_seconds)
    asked_for = config  # an elastic run may have fewer stages at the moment
    config = config if world is None else fitted(config, world.size)
    position = position_of(config, world)
    data = data_folder(config)
    rolled: Rollback | None = None
    reason = ""  # why the last attempt ended
    monitor: Monitor | None = None  # of the stretch before
    with stop_signals(told) as asked, folders.disk_errors(Path(config.run.dir)), ExitStack() as held:
        for attempt in itertools.count():
            own_board = board.under(f"attempt-{attempt}")
            if not reason and position.leader:
                _take(Path(config.run.dir), own_board, held)
            recut = reason == "recut"
            plan = _agree_on_plan(asked_for, config, position, data, own_board, rolled, recut)
            if plan.finished:
                if position.leader:
                    closing.say_finished(config, plan.step)
                return {"step": plan.step, "reason": "finished", "validation_loss": None}
            if started_by_torchrun() and world is not None and config.checkpoint.keep > 0:
                plan = _with_folders(config, position, plan, own_board)
            config = cutovers.decided(config, plan.cutover)
            before = monitor if recut else None
            outcome, monitor = _attempt(
                config, world, position, data, plan, own_board, asked, command, before
            )
            reason = outcome.reason
            if reason not in ("rollback", "recut"):
                return dataclasses.asdict(outcome)
            rolled = _rolled_back(outcome, plan, rolled) if reason == "rollback" else None
            gc.collect()  # engine and hooks hold each other, and a device has no room for a second engine
    raise AssertionError("unreachable")


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Why the last attempt ended, for the next one. Ranks see the same steps, so they agree on it."""

    seen: int  # data groups used up to then; none of them is used again
    failed_at: int  # the step that showed it: only checkpoints before it are gone back to
    began_at: int  # where the attempt had started from
    fruitless: int  # attempts in a row that ended without getting to a newer checkpoint


def _rolled_back(outcome: Outcome, plan: Plan, last: Rollback | None) -> Rollback:
    assert outcome.failed_at is not None
    again = last is not None and last.began_at == plan.step
    fruitless = last.fruitless + 1 if last is not None and again else 1
    if fruitless > MAX_FRUITLESS:
        raise HealthError(
            f"{fruitless} attempts from step {plan.step}, each on new data, failed; the last at step "
            f"{outcome.failed_at}. It is not the data: lower optim.lr, raise optim.warmup, or start from an earlier "
            "checkpoint."
        )
    return Rollback(outcome.step + plan.data_offset, outcome.failed_at, plan.step, fruitless)


def _attempt(
    config: Config,
    world: World | None,
    position: Position,
    data: Path | None,
    plan: Plan,
    board: Board,
    asked: threading.Event,
    command: str,
    before: Monitor | None,
) -> tuple[Outcome, Monitor]:
    with assemble(config, world, position, data, plan, board, command, before) as parts:
        try:
            outcome = train(parts, plan.step, plan.data_offset, asked, validate_first=plan.validate)
            parts.engine.close()  # with the other ranks, which do not wait for the report
            closing.close(parts, outcome)
        except Exception as error:
            closing.record_failure(parts, error)
            raise
    return outcome, parts.monitor


def _take(folder: Path, board: Board, held: ExitStack) -> None:
    """On the leader: the folder is this run's until `held` ends."""
    try:
        held.enter_context(folders.lock(folder))
    except UserError as error:
        board.post("plan", {"error": str(error)})
        raise


def _agree_on_plan(
    asked_for: Config,
    config: Config,
    position: Position,
    data: Path | None,
    board: Board,
    rolled: Rollback | None,
    recut: bool,
) -> Plan:
    """The leader decides; the others take its word."""
    folder = Path(config.run.dir)
    if position.leader:
        remote = remote_of(config)
        try:
            train_data, valid_data = datasets(config, data)
            if rolled is not None:
                in_memory.forget(folder)  # of the steps that are taken back
                earlier = checkpoint.forget_from(folders.checkpoints(folder), rolled.failed_at)
                if earlier and remote is not None:
                    remote.forget_from(rolled.failed_at)
            with beating(board, "planning"):  # large checkpoints, and new data, take a while
                contents = {"training": train_data.contents(), "validation": valid_data.contents()}
                before = last_started(folder)
                plan = folders.plan(
                    folder, asked_for, train_data.fingerprint(), contents, remote, recut=recut
                )
                notes = cutovers.waits(cutovers.decided(config, plan.cutover), before)
                stages = asked_for.pipeline.stages
                plan = dataclasses.replace(plan, notes=(*plan.notes, *notes), stages=stages, recut=recut)
            if rolled is not None:
                note = (
                    f"Rolled back to step {plan.step} because of step {rolled.failed_at}; the data groups up to "
                    f"{rolled.seen - 1} are not used again."
                )
                plan = dataclasses.replace(
                    plan, data_offset=rolled.seen - plan.step, notes=(*plan.notes, note)
                )
        except UserError as error:
            board.post("plan", {"error": str(error)})
            raise
        board.post("plan", dataclasses.asdict(plan))
    (answer,) = board.wait("plan", beat="planning")
    if "error" in answer:
        raise UserError(answer["error"])
    return Plan(**answer)


def _with_folders(config: Config, position: Position, plan: Plan, board: Board) -> Plan:
    """On several machines: one run.dir for all, or a place between them that the checkpoint is fetched from."""
    folder, timeout = Path(config.run.dir), config.train.timeout_seconds
    remote = remote_of(config)
    if remote is None:
        same_folder.require_one(board, position, folder, plan.nonce, timeout)
        return plan
    blind, _ = same_folder.blind_ranks(board, position, folder, plan.nonce, timeout)
    if blind and not position.leader:
        folder.mkdir(parents=True, exist_ok=True)
        if plan.source is not None and not plan.forked:
            remote.bring(Path(plan.source), plan.source_sha256)
    return dataclasses.replace(plan, shared=not blind)


@contextmanager
def stop_signals(told: Asked | None = None) -> Iterator[threading.Event]:
    """The event that SIGTERM, SIGINT and SIGUSR1 (of a batch system, ahead of its limit) set, at any moment from the
    first line of a rank to its last; the loop passes it on. A second Ctrl-C interrupts; an ignored signal stays
    ignored. `told` hears of the first one when it comes.

    Our own workers are born with these signals blocked (`distributed/launch.py`): what came before this point is
    delivered here. Outside the main thread (tests) nothing is installed.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if number == signal.SIGINT and asked.is_set() and time.monotonic() - first > SECOND_SECONDS:
            raise KeyboardInterrupt
        first = first or time.monotonic()
        if told is not None and not asked.is_set():
            told.first()
        asked.set()

    numbers = [n for n in (*STOPS, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, note) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield asked
        if not started_by_torchrun():  # whose ranks still wait for each other
            before = after_the_end(before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)

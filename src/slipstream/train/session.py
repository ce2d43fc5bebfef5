"""From a config to a finished run: start the ranks, agree on what to do, build the parts, train, say what
was made.

The same `run_rank` serves the workers this command starts, torchrun's ranks, and the one process of the
emulator. Rank 0 is the leader: it alone decides (`folder.plan`), writes events and commits checkpoints.
"""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from slipstream.config import Config, from_tree, resolve
from slipstream.distributed import World, initialise, launch, started_by_torchrun
from slipstream.errors import UserError
from slipstream.metrics.progress import Show
from slipstream.metrics.record import Recorder, has_event
from slipstream.metrics.throughput import Meter, peak_flops
from slipstream.models.sizes import ModelConfig, flops_per_token, parameters
from slipstream.train import build, closing, health
from slipstream.train import folder as folders
from slipstream.train.batches import Place
from slipstream.train.board import Board, LocalBoard, SharedBoard
from slipstream.train.engine import Emulated, Engine
from slipstream.train.folder import Plan
from slipstream.train.master import TOKENIZER_FILE
from slipstream.train.pipelined import Pipelined
from slipstream.train.reporter import Reporter, Seat
from slipstream.train.resume import load_into
from slipstream.train.synchronous import Synchronous
from slipstream.train.trackers import open_trackers
from slipstream.train.trainer import Outcome, Parts, train
from slipstream.train.writer import Leader, Writer


def start(config: Config) -> None:
    """`slipstream train`: in this process (emulate), as one of torchrun's ranks, or on ranks started here."""
    config = build.adopt_shape(config)
    if started_by_torchrun() and config.pipeline.schedule != "emulate":
        with initialise(timeout_seconds=config.train.timeout_seconds) as world:
            run_rank(world, resolve(config, world=world.size).model_dump())
        return
    config = resolve(config)
    build.device(config)  # a wrong device or data is said here once, before ranks start
    build.datasets(config, build.data_folder(config))
    if config.pipeline.schedule == "emulate":
        torch.set_num_threads(1)  # the bits of long sums depend on it
        run_rank(None, config.model_dump())
        return
    assert config.pipeline.stages is not None
    nproc = config.pipeline.stages * config.pipeline.data_ranks
    launch("slipstream.train.session:run_rank", nproc, (config.model_dump(),), on_signal=True)


def run_rank(world: World | None, tree: dict[str, Any]) -> dict[str, Any]:
    """One rank, from start to end; rollbacks begin again with a new engine."""
    config = from_tree(tree)
    board: Board = LocalBoard() if world is None else SharedBoard(world.store, config.train.timeout_seconds)
    seat = _seat(config, world)
    data = build.data_folder(config)
    with ExitStack() as held:
        offset: int | None = None
        for attempt in range(1_000_000):
            own_board = board.under(f"attempt-{attempt}")
            plan = _agree_on_plan(config, seat, data, own_board, held if attempt == 0 else None, offset)
            if plan.finished:
                if seat.leader:
                    closing.say_finished(Path(config.run.dir), plan.step)
                return {"step": plan.step, "reason": "finished"}
            outcome = _train(config, world, seat, data, plan, own_board)
            if outcome.reason != "rollback":
                return {
                    "step": outcome.step,
                    "reason": outcome.reason,
                    "validation_loss": outcome.validation_loss,
                }
            offset = outcome.step + plan.data_offset  # data groups seen so far; none of them again
    raise AssertionError("unreachable")


def _agree_on_plan(
    config: Config, seat: Seat, data: Path, board: Board, held: ExitStack | None, seen: int | None
) -> Plan:
    """The leader locks the folder and decides; the others take its word."""
    if seat.leader:
        folder = Path(config.run.dir)
        try:
            if held is not None:
                held.enter_context(folders.lock(folder))
            train_data, _ = build.datasets(config, data)
            fingerprint = train_data.fingerprint()
            plan = folders.plan(folder, config, fingerprint)
            if seen is not None:
                plan = dataclasses.replace(plan, data_offset=seen - plan.step)
        except UserError as error:
            board.post("plan", {"error": str(error)})
            raise
        board.post("plan", plan.to_json() | {"fingerprint": fingerprint})
    (answer,) = board.wait("plan")
    if "error" in answer:
        raise UserError(answer["error"])
    answer.pop("fingerprint")
    return Plan.from_json(answer)


def _train(config: Config, world: World | None, seat: Seat, data: Path, plan: Plan, board: Board) -> Outcome:
    """Build the parts of this rank and train until something ends the stretch."""
    folder, model = Path(config.run.dir), build.shape(config, data)
    device = build.device(config, 0 if world is None else world.local_rank)
    train_data, valid_data = build.datasets(config, data)
    engine = _engine(config, model, world, device)
    if plan.source is not None:
        load_into(engine, Path(plan.source), config)
    with ExitStack() as stack:
        recorder, show = None, None
        if seat.leader:
            recorder = _open_records(config, model, plan, data, train_data.fingerprint(), device, stack)
            show = stack.enter_context(Show(config.train.steps, config.train.log_every))
            for text in plan.notes:
                show.note(text, "yellow")
        else:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        monitor = health.Monitor(config.health.spike, config.health.max_skipped)

        def observe(step: int, loss: float, skipped: bool) -> None:
            warning = monitor.observe(step, loss, skipped)
            if warning is not None and recorder is not None and show is not None:
                recorder.write("warning", step, message=warning)
                show.note(warning, "yellow")

        def failed(step: int, text: str) -> None:
            if recorder is not None and show is not None:
                recorder.write("warning", step, message=text)
                show.note(text, "bold red")

        meter = Meter(
            config.train.steps,
            config.tokens_per_step,
            flops_per_token(model, config.data.sequence),
            _peak(device, seat),
        )
        log = None if seat.leader else folder / "logs" / f"rank-{seat.rank}.log"
        reporter = Reporter(
            config, seat, engine, board, meter, recorder=recorder, show=show, log=log, observe=observe
        )
        stack.callback(reporter.close)
        writer = _writer(config, seat, plan, recorder, failed)
        parts = Parts(
            config=config,
            seat=seat,
            engine=engine,
            board=board,
            train_data=train_data,
            valid_data=valid_data,
            place=Place(
                config.pipeline.microbatches,
                first=seat.rank % seat.stages == 0,
                last=seat.has_loss,
                data_rank=seat.data_rank,
                data_ranks=seat.data_ranks,
                pin=device.type == "cuda",
            ),
            device=device,
            learning_rate=build.learning_rate(config),
            reporter=reporter,
            writer=writer,
            monitor=monitor,
            recorder=recorder,
            note=show.note if show is not None else lambda text: None,
            meta={
                "config": config.model_dump(),
                "model": dataclasses.asdict(model),
                "data_folder": str(data.resolve()),
                "data_fingerprint": train_data.fingerprint(),
            },
            root=folders.checkpoints(folder),
            tied=("embedding.weight", "head.weight") if model.tied else (),
        )
        outcome = train(parts, plan.step, plan.data_offset)
        if recorder is not None and show is not None:
            closing.close(config, outcome, train_data, model, recorder, show, reporter.busy)
    return outcome


def _engine(config: Config, model: ModelConfig, world: World | None, device: torch.device) -> Engine:
    if world is None:
        return Emulated(config, model, device)
    if config.synchronous:
        return Synchronous(config, model, world, device)
    return Pipelined(config, model, world, device)


def _seat(config: Config, world: World | None) -> Seat:
    stages = config.pipeline.stages
    assert stages is not None
    if world is None:
        return Seat(0, 1, 1, True)
    stage, _ = world.mesh(stages)
    # A V-shaped schedule folds back: its last module sits on the first rank.
    last = 0 if config.pipeline.schedule == "zbv" else stages - 1
    return Seat(world.rank, stages, config.pipeline.data_ranks, stage == last)


def _writer(config: Config, seat: Seat, plan: Plan, recorder: Recorder | None, failed: Any) -> Writer:
    """Each rank writes what it owns; the leader commits."""
    root = folders.checkpoints(Path(config.run.dir))
    ranks = range(seat.stages * (seat.data_ranks if config.pipeline.shard_optimizer else 1))
    names = tuple(_piece(rank, seat.stages, config.pipeline.shard_optimizer) for rank in ranks)
    leader = None
    if recorder is not None:

        def committed(step: int, path: Path) -> None:
            recorder.write("checkpoint", step, path=f"checkpoints/{path.name}")

        leader = Leader(names, config.checkpoint.keep, recorder.wait_for, committed)
    piece = _piece(seat.rank, seat.stages, config.pipeline.shard_optimizer)
    return Writer(root, plan.nonce, piece, failed, leader, config.train.timeout_seconds)


def _piece(rank: int, stages: int, sharded: bool) -> str:
    name = f"stage-{rank % stages:03d}"
    return f"{name}.data-{rank // stages:03d}" if sharded else name


def _open_records(
    config: Config,
    model: ModelConfig,
    plan: Plan,
    data: Path,
    fingerprint: str,
    device: torch.device,
    stack: ExitStack,
) -> Recorder:
    """The leader's files: resolved config, environment, tokenizer, events."""
    folder = Path(config.run.dir)
    folders.write_config(folder, config)
    described = {"folder": str(data), "fingerprint": fingerprint}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    folders.write_environment(folder, config, described, name)
    if (data / TOKENIZER_FILE).is_file():
        shutil.copyfile(data / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    recorder = Recorder(folder, open_trackers(config, folder))
    stack.callback(recorder.close)
    recorder.write(
        "start",
        plan.step,
        stages=config.pipeline.stages,
        data_ranks=config.pipeline.data_ranks,
        schedule=config.pipeline.schedule,
        microbatches=config.pipeline.microbatches,
        parameters=parameters(model),
        resumed=plan.source is not None and not plan.forked,
    )
    if plan.source is not None and not plan.forked and not has_event(folder, "checkpoint", plan.step):
        recorder.write("checkpoint", plan.step, path=f"checkpoints/{Path(plan.source).name}")
    for text in plan.notes:
        recorder.write("warning", plan.step, message=text)
    return recorder


def _peak(device: torch.device, seat: Seat) -> float | None:
    if device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(device))
    devices = min(seat.stages * seat.data_ranks, torch.cuda.device_count())
    return None if peak is None else peak * devices

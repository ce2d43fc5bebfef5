"""The parts of one rank of a run, put together: engine, records, reporter, writer, health."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from slipstream.config import Config
from slipstream.data.shards import find_shards, fingerprint
from slipstream.distributed import World
from slipstream.metrics.progress import Show
from slipstream.metrics.record import Recorder, has_event
from slipstream.metrics.throughput import Meter, peak_flops
from slipstream.models.sizes import ModelConfig, flops_per_token, parameters
from slipstream.train import build, checkpoint, fine
from slipstream.train import folder as folders
from slipstream.train.arithmetic import arithmetic
from slipstream.train.batches import Share
from slipstream.train.board import Board
from slipstream.train.claim import claim_memory
from slipstream.train.engine import engine_of
from slipstream.train.folder import Plan
from slipstream.train.health import Best, Monitor
from slipstream.train.master import TOKENIZER_FILE
from slipstream.train.own_model import OwnModel
from slipstream.train.remote import remote_of
from slipstream.train.reporter import Position, Reporter
from slipstream.train.resume import load_into
from slipstream.train.sources import datasets
from slipstream.train.starts import Starts
from slipstream.train.state import digest
from slipstream.train.trackers import open_trackers
from slipstream.train.trainer import RunParts
from slipstream.train.writer import Leader, Writer

Warn = Callable[[int, str], None]


def position_of(config: Config, world: World | None) -> Position:
    if world is None:
        return Position(0, 1, 1, True)
    stage, _ = world.mesh(config.stages)
    # A V-shaped schedule folds back: its last module sits on the first rank.
    last = 0 if config.pipeline.schedule == "zbv" else config.stages - 1
    return Position(world.rank, config.stages, config.pipeline.data_ranks, stage == last)


@contextmanager
def assemble(
    config: Config,
    world: World | None,
    position: Position,
    data: Path | None,
    plan: Plan,
    board: Board,
    command: str = "",
    before: Monitor | None = None,
) -> Iterator[RunParts]:
    """Build everything this rank needs in the stretch that begins now; it is closed at the end. `before`: what has
    watched the stretch before it."""
    whole = config
    as_begun = Starts(**plan.starts).kept(whole)
    config, end = fine.stretch(as_begun, plan.step), fine.end_of_stretch(as_begun, plan.step)
    model = build.shape(config, data)
    device = build.device(config, 0 if world is None else world.local_rank)
    train_data, valid_data = datasets(config, data)
    with ExitStack() as stack:
        stack.enter_context(arithmetic(config.train, device))
        engine = stack.enter_context(engine_of(config, model, world, device))
        if plan.source is not None:
            load_into(engine, Path(plan.source), as_begun)
        recorder, show = None, None
        if position.leader:
            recorder = _open_records(whole, config, model, plan, data, device, stack, command)
            show = Show(config.train.steps, config.train.log_every, quiet=config.train.quiet)
            if plan.recut:
                show.note(f"From step {plan.step} on: {config.pipeline.microbatches} microbatches an update.")
            elif plan.source is not None:
                does = "A fork starts" if plan.forked else "The run goes on"
                show.note(f"{does} from step {plan.step} ({plan.source})")
            stack.enter_context(show)
            recorder.warn_through(lambda text: show.note(text, "yellow"))

        def warn(step: int, text: str) -> None:
            if recorder is not None and show is not None:
                recorder.write("warning", step, message=text)
                show.note(text, "yellow")

        for text in plan.notes:
            warn(plan.step, text)
        monitor = Monitor(config.health.spike, config.health.max_skipped, _first_checkpoint(config, plan))
        if before is not None:
            monitor.go_on(before)
        own = isinstance(model, OwnModel)  # what it computes is not known
        flops = 0.0 if own else flops_per_token(model, config.data.sequence)
        meter = Meter(
            config.train.steps, config.tokens_per_step, flops, None if own else _peak(config, position)
        )
        reporter = Reporter(config, position, engine, board, meter, monitor, warn, recorder, show)
        stack.callback(reporter.close)
        best = Best.after(plan.validations)
        writer = _writer(config, position, plan, recorder, warn, best)
        stack.callback(writer.close)
        memory = _memory_writer(config, position, plan, recorder, warn)
        if memory is not None:
            stack.callback(memory.close)
        yield RunParts(
            config=config,
            end=end,
            model=model,
            position=position,
            engine=engine,
            board=board,
            train_data=train_data,
            valid_data=valid_data,
            share=Share(
                config.pipeline.microbatches,
                first=position.rank % position.stages == 0,
                last=position.has_loss,
                data_rank=position.data_rank,
                data_ranks=position.data_ranks,
                pin=device.type == "cuda",
            ),
            device=device,
            learning_rate=build.learning_rate(config),
            reporter=reporter,
            writer=writer,
            memory=memory,
            monitor=monitor,
            best=best,
            recorder=recorder,
            show=show,
            meta={
                "config": whole.model_dump(),
                "starts": vars(Starts.of(as_begun)),
                "model": model.describe() if isinstance(model, OwnModel) else dataclasses.asdict(model),
                "data_folder": str((data or Path()).resolve()),
                "data_fingerprint": plan.data_fingerprint,
                "data_contents": plan.data_contents,
            },
            root=folders.checkpoints(Path(config.run.dir)),
            tied=("embedding.weight", "head.weight") if isinstance(model, ModelConfig) and model.tied else (),
        )


def _first_checkpoint(config: Config, plan: Plan) -> int | None:
    """From which step on this run can roll back, if it was asked to."""
    if not config.health.rollback:
        return None
    if plan.source is not None and not plan.forked:
        return plan.step
    return plan.step + config.checkpoint.every if config.checkpoint.every else None


def _writer(
    config: Config, position: Position, plan: Plan, recorder: Recorder | None, warn: Warn, best: Best
) -> Writer:
    """Each rank writes what it owns; the leader commits."""
    leader = None
    if recorder is not None:

        def committed(step: int, path: Path) -> None:
            recorder.write("checkpoint", step, path=f"checkpoints/{path.name}")
            if config.checkpoint.best and step == best.step:
                checkpoint.point_at(path)

        def protected() -> int | None:
            return best.step if config.checkpoint.best else None

        pieces = _pieces(config, position)
        leader = Leader(pieces, config.checkpoint.keep, recorder.wait_for, committed, protected)
    root = folders.checkpoints(Path(config.run.dir))
    own, train = _piece(config, position, position.rank), config.train
    return Writer(
        root, plan.nonce, own, warn, leader, train.timeout_seconds, train.disk_seconds, remote_of(config), plan.shared,
    )  # fmt: skip


def _memory_writer(
    config: Config, position: Position, plan: Plan, recorder: Recorder | None, warn: Warn
) -> Writer | None:
    """The same for checkpoints in memory, of which the newest is kept."""
    hands_over = not config.checkpoint.keep and fine.end_of_stretch(config, plan.step) < config.train.steps
    if not config.checkpoint.memory_every and not hands_over:
        return None
    leader = None
    if recorder is not None:

        def committed(step: int, path: Path) -> None:
            recorder.write("checkpoint", step, memory=digest(path / "manifest.json").sha256)

        leader = Leader(_pieces(config, position), 1, recorder.wait_for, committed)
    root = claim_memory(Path(config.run.dir), _machines(position))
    own = _piece(config, position, position.rank)
    return Writer(root, plan.nonce, own, warn, leader, config.train.timeout_seconds)


def _piece(config: Config, position: Position, rank: int) -> str:
    name = f"stage-{rank % position.stages:03d}"
    return f"{name}.data-{rank // position.stages:03d}" if config.pipeline.shard_optimizer else name


def _pieces(config: Config, position: Position) -> tuple[str, ...]:
    writers = position.stages * (position.data_ranks if config.pipeline.shard_optimizer else 1)
    return tuple(_piece(config, position, rank) for rank in range(writers))


def _machines(position: Position) -> int:
    return max(1, position.ranks // int(os.environ.get("LOCAL_WORLD_SIZE", position.ranks)))  # torchrun says


def _open_records(
    whole: Config,
    config: Config,
    model: build.Model,
    plan: Plan,
    data: Path | None,
    device: torch.device,
    stack: ExitStack,
    command: str,
) -> Recorder:
    """The leader's files: resolved config, environment, tokenizer, events. `whole`: of all stretches of the run."""
    folder = Path(config.run.dir)
    folders.write_config(folder, whole.changed(pipeline={"stages": plan.stages}) if plan.stages else whole)
    described = {"folder": str(data or config.data.module), "fingerprint": plan.data_fingerprint}
    if data is not None:  # other text to validate on is another loss
        described["validation_fingerprint"] = fingerprint(find_shards(data, "valid"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    folders.write_environment(folder, config, described, name, command)
    if data is not None and (data / TOKENIZER_FILE).is_file():
        with contextlib.suppress(shutil.SameFileError):  # a run in the folder of its data
            shutil.copyfile(data / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    recorder = Recorder(folder, open_trackers(whole, folder, plan.step), config.train.disk_seconds)
    stack.callback(recorder.close)
    resumed = plan.source is not None and not (plan.forked or plan.recut)
    recorder.write(
        "start",
        plan.step,
        stages=config.pipeline.stages,
        data_ranks=config.pipeline.data_ranks,
        schedule=config.pipeline.schedule,
        microbatches=config.pipeline.microbatches,
        cutover=config.pipeline.cutover,
        parameters=model.parameters if isinstance(model, OwnModel) else parameters(model),
        resumed=resumed,
        **({"recut": True} if plan.recut else {}),
        **({"lost_steps": plan.lost_steps, "heard_of": plan.heard_of} if resumed else {}),
    )
    if resumed and not has_event(folder, "checkpoint", plan.step):
        recorder.write("checkpoint", plan.step, path=f"checkpoints/{Path(str(plan.source)).name}")
    return recorder


def _peak(config: Config, position: Position) -> float | None:
    """FLOP/s of all GPUs of the run, where they are known."""
    if build.device(config).type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name())
    devices = min(position.ranks, torch.cuda.device_count() * _machines(position))
    return None if peak is None else peak * devices

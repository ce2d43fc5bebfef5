"""The run folder: who may write in it, and what starting there means.

    config.toml (resolved)   environment.json   events.jsonl   checkpoints/   logs/   report.html

Invariant: one run at a time (`lock`, released by the system when its holder dies), and a folder's trajectory
never changes: a start that would change it is refused with the difference shown.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from slipstream.config import Change, Config, from_tree, to_toml
from slipstream.errors import CheckpointError, DiskError, InUseError, UserError
from slipstream.metrics.events import EVENTS_FILE, number, read_run
from slipstream.metrics.record import Cut, cut_back, finished_at, has_event
from slipstream.train import checkpoint, cutovers, in_memory, provenance
from slipstream.train.build import learning_rate
from slipstream.train.claim import LOCK_FILE, last_started, refuse_foreign
from slipstream.train.own_model import changed_description
from slipstream.train.remote import Copy, Remote
from slipstream.train.starts import Starts
from slipstream.train.state import digest

LOCK_PATIENCE_SECONDS = 10.0  # the workers of a killed launcher need a moment to notice


@dataclass(frozen=True)
class Plan:
    """What all ranks do: decided once, by the leader."""

    step: int = 0  # updates already done
    source: str | None = None  # checkpoint folder to load, None: initial weights
    finished: bool = False
    forked: bool = False  # `source` belongs to another run
    recut: bool = False  # the stretch before this one has just ended
    data_offset: int = 0  # groups of data left out by rollbacks
    data_fingerprint: str = ""
    nonce: str = field(default_factory=lambda: secrets.token_hex(4))  # names this attempt's drafts
    notes: Sequence[str] = ()
    validate: bool = False  # a kill came between the checkpoint of `step` and its validation
    cutover: int | float | list[int] | None = None  # what pipeline.cutover is for this run
    starts: Mapping[str, int | None] = field(default_factory=dict)  # that the run has had
    validations: Sequence[tuple[int, float]] = ()  # (step, loss) so far
    data_contents: Mapping[str, str] = field(default_factory=dict)  # every byte of a split, as a hash
    stages: int | None = None  # asked for; an elastic run may have fewer at the moment
    lost_steps: int = 0  # done after `step` before the run was last heard of, and to be done again
    heard_of: float | None = None  # when that was
    source_sha256: str = ""  # of the manifest of `source`, for machines that have a copy of it or need one
    shared: bool = True  # all ranks see one run.dir


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """A disk that is full or may not be written is for the user to put right, and costs no finished checkpoint."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            raise
        raise DiskError(
            f"run.dir '{folder}' cannot be written: {error.strerror}. Finished checkpoints are untouched: make room, "
            "then the same command goes on from the newest."
        ) from error


def checkpoints(folder: Path) -> Path:
    return folder / "checkpoints"


def lock(folder: Path) -> IO[str]:
    """Make the folder and take its lock for as long as the returned file stays open."""
    refuse_foreign(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"run.dir '{folder}' cannot be written: {error}. Set run.dir to a writable folder."
        ) from None
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > deadline:
                file.seek(0)
                raise InUseError(
                    f"run.dir '{folder}' is in use by process {file.read().strip() or 'unknown'}. "
                    "Wait for it, stop it, or set another run.dir."
                ) from None
            time.sleep(0.1)
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def plan(
    folder: Path,
    config: Config,
    data_fingerprint: str,
    contents: Mapping[str, str] | None = None,
    remote: Remote | None = None,
    *,
    recut: bool = False,
) -> Plan:
    """Look at what the folder holds and decide. Call with the lock held. `contents`: of the data, by split; `recut`:
    this run goes on at once, from what it has just handed over."""
    notes: list[str] = []
    new = Plan(data_fingerprint=data_fingerprint, data_contents=dict(contents or {}))
    root = checkpoints(folder)
    checkpoint.sweep(root)
    found, copy = _newest(root, remote, notes)
    if found is None and not config.checkpoint.keep and (ended := _ended(folder, config, new)) is not None:
        in_memory.forget(folder)
        return ended
    in_memory.follow(folder)
    near = in_memory.newest(folder, notes.append)
    if near is not None and (found is None or near[1].step > found[1].step):
        found, copy = near, None
        if not recut:
            notes.append(f"Going on from the checkpoint of step {near[1].step} in memory.")
    in_memory.forget(folder, but=found[0] if found is not None and found is near else None)
    if found is None:
        return _ended(folder, config, new) or _begin(folder, config, new, notes)
    path, manifest = found
    config = cutovers.with_cutover(config, _kept(manifest))
    try:
        notes += _check_same_run(folder, config, manifest, new)
    except UserError as error:
        if copy is None or remote is None:
            raise
        shutil.rmtree(path)
        raise UserError(
            f"{error}\nIt came from checkpoint.remote = '{remote.url}': one URL is for one run."
        ) from None
    if copy is not None and remote is not None:
        remote.restore_log(copy, folder)
    step, offset, every = manifest.step, manifest.says("data_offset", int), config.train.eval_every
    stored = from_tree(manifest.says("config", dict))
    had = stored.train
    starts = Starts.had(manifest, stored).where_asked_alike(stored, config)
    if not recut and had.steps != config.train.steps:
        notes += starts.notes(config, step)
    # A run that train.patience ended is finished until that, or its length, is changed.
    same = (config.train.patience, config.train.steps) == (had.patience, had.steps)
    trained = step >= config.train.steps or (bool(config.train.patience) and same)
    finished = trained and has_event(folder, "finish", step)
    trained = trained and (finished or step >= config.train.steps)
    cut = Cut(0, None)
    if not finished:
        cut = cut_back(folder, step, again=("validation", "sample") if trained else ())
    due = bool(every) and step % every == 0 and not trained
    missed = due and not has_event(folder, "validation", step)
    if remote is not None and not finished and path.parent == root:
        remote.catch_up(path, new.nonce)
    return replace(
        new,
        step=step,
        source=str(path),
        source_sha256=digest(path / "manifest.json").sha256,
        finished=finished,
        data_offset=offset,
        notes=notes,
        validate=missed,
        cutover=config.pipeline.cutover,
        starts=vars(starts),
        validations=[] if finished else _validations(folder, step),
        lost_steps=cut.steps,
        heard_of=cut.until,
    )


def _newest(
    root: Path, remote: Remote | None, notes: list[str]
) -> tuple[tuple[Path, checkpoint.Manifest] | None, Copy | None]:
    """The newest good checkpoint, and the copy it was fetched from where the disk has none that is as new."""
    found, damaged = None, None
    try:
        found = checkpoint.newest_good(root, notes.append)
    except CheckpointError as error:
        damaged = error
    copy = None if remote is None else remote.restore(root, found[1].step if found else -1, notes.append)
    if copy is not None:
        path = checkpoint.folder_of(root, copy.step)
        found = path, checkpoint.manifest(path)
    elif damaged is not None:
        raise damaged
    return found, copy


def _validations(folder: Path, step: int) -> list[tuple[int, float]]:
    if not (folder / EVENTS_FILE).is_file():  # somebody removed the folder while the run was writing into it
        return []
    found = read_run(folder).surviving("validation")
    return [(event["step"], value) for event in found if (value := number(event.get("loss"))) is not None]


def write_config(folder: Path, config: Config) -> None:
    draft = folder / ".config.toml"
    draft.write_text(to_toml(config), encoding="utf-8")
    draft.rename(folder / "config.toml")


def write_environment(
    folder: Path, config: Config, data: dict[str, Any], device: str, command: str = ""
) -> None:
    """Versions, machine, seeds, data: what a number in events.jsonl rests on."""
    more = () if config.model.hf is None else ("transformers",)
    code = provenance.code()
    environment = {
        "command": command or shlex.join(sys.argv),
        "python": platform.python_version(),
        "versions": provenance.versions(*more),
        "commit": code.commit,
        "source": code.source,
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "device": device,
        "seed": config.train.seed,
        "data": data,
        "time": time.time(),
    }
    (folder / "environment.json").write_text(json.dumps(environment, indent=2), encoding="utf-8")


def _ended(folder: Path, config: Config, new: Plan) -> Plan | None:
    """A finished run without a checkpoint (checkpoint.keep = 0); None where there is no such run."""
    steps, stored = finished_at(folder), last_started(folder)
    if steps is None or stored is None:
        return None
    config = cutovers.with_cutover(config, stored)
    if changed := cutovers.changes(stored, config):
        lines = "\n".join(f"  - {change}" for change in changed)
        raise UserError(f"'{folder}' holds another run, finished:\n{lines}\nSet another run.dir.")
    if config.checkpoint.keep:
        return None  # its checkpoints were removed: trained again
    return replace(new, step=steps, finished=True)


def _set_aside(folder: Path, config: Config) -> list[str]:
    """The log of another run that never came to a checkpoint is kept under another name."""
    events, stored = folder / EVENTS_FILE, last_started(folder)
    if (
        not events.is_file()
        or not events.stat().st_size
        or (stored is not None and not cutovers.changes(stored, cutovers.with_cutover(config, stored)))
    ):
        return []
    aside = events.with_name(f"{events.stem}-{time.time_ns()}{events.suffix}")
    events.rename(aside)
    return [f"'{folder}' held the log of another run without a checkpoint. It is kept as '{aside.name}'."]


# What decides which weights a model has, and their shapes.
_SHAPES = ("vocab", "dim", "layers", "heads", "kv_heads", "head_width", "ffn", "tied", "qk_norm", "experts")


def _begin(folder: Path, config: Config, new: Plan, notes: list[str]) -> Plan:
    """No checkpoint here: a new run, from initial weights or from another run's checkpoint."""
    notes += _set_aside(folder, config)
    cut_back(folder, -1)
    if config.run.fork_from is None:
        return replace(new, notes=notes, cutover=cutovers.with_cutover(config, None).pipeline.cutover)
    path = checkpoint.locate(config.run.fork_from)
    manifest = checkpoint.verify(path)
    if manifest.step >= config.train.steps:
        raise UserError(
            f"run.fork_from is at step {manifest.step}; train.steps = {config.train.steps} leaves nothing to do. Set "
            "train.steps higher."
        )
    stored = from_tree(manifest.says("config", dict))
    config = cutovers.with_cutover(config, stored)
    changed = cutovers.changes(stored, config)
    if other := [change for change in changed if change.name in {f"model.{key}" for key in _SHAPES}]:
        lines = "\n".join(f"  - {change}" for change in other)
        raise UserError(
            f"run.fork_from has weights of another model:\n{lines}\nGive the model it was trained with."
        )
    notes.append(f"Forked from {path} (step {manifest.step}).")
    notes += [f"Changed in the fork: {change}." for change in changed if change.name != "run.fork_from"]
    starts = Starts.had(manifest, stored).where_asked_alike(stored, config)
    notes += starts.notes(config, manifest.step)
    return replace(
        new,
        step=manifest.step,
        source=str(path),
        forked=True,
        data_offset=manifest.says("data_offset", int),
        notes=notes,
        cutover=config.pipeline.cutover,
        starts=vars(starts),
    )


def _check_same_run(folder: Path, config: Config, manifest: checkpoint.Manifest, new: Plan) -> list[str]:
    """Refuse a start that would change the trajectory; say which allowed switch is made."""
    try:
        stored = from_tree(manifest.says("config", dict))
    except UserError as error:
        raise CheckpointError(f"The checkpoints of '{folder}' belong to another version: {error}") from None
    differences = cutovers.changes(stored, config)
    longer = config.train.steps > stored.train.steps
    switched = _family(stored) != _family(config)
    allowed = {"data.path"}  # what lies there decides, by its fingerprint, and not how it is reached
    if not switched or config.run.switch:
        allowed |= {"pipeline.schedule", "pipeline.delay"}
    if switched and config.run.switch:
        allowed |= {"optim.correction", "optim.correction_lambda", "optim.sync_start", "optim.sync_finish"}
        allowed |= {"pipeline.cutover", "pipeline.fine_start", "pipeline.fine_microbatches"}
    if longer:
        allowed.add("train.steps")
    refused: list[Change | str] = [change for change in differences if change.name not in allowed]
    ranks = stored.pipeline.data_ranks, config.pipeline.data_ranks
    described = manifest.says("model", dict).get("hugging_face") or {}
    balanced = (stored.model.experts and stored.model.balance_loss) or described.get("output_router_logits")
    if ranks[0] != ranks[1] and balanced:
        # Not linear in the rows, so not the same loss when other rows are taken together.
        refused.append(
            f"pipeline.data_ranks: the run has {ranks[0]}, asked for {ranks[1]}; the balance loss of its experts is "
            "taken over the rows of one data rank"
        )
    if config.model.hf is not None:
        refused += changed_description(described, config)
    if manifest.says("data_fingerprint", str) != new.data_fingerprint:
        refused.append(
            f"data: the run's had the fingerprint {manifest.meta['data_fingerprint'][:12]}, this has "
            f"{new.data_fingerprint[:12]}"
        )
    else:
        # Not in checkpoints of before it was kept.
        had = manifest.says("data_contents", dict) if "data_contents" in manifest.meta else {}
        refused += [
            f"data: the run's {split} shards had the contents {str(had[split])[:12]}, these have {found[:12]}"
            for split, found in new.data_contents.items()
            if had.get(split, found) != found
        ]
    if refused:
        lines = "\n".join(f"  - {change}" for change in refused)
        if [getattr(change, "name", "") for change in refused] == ["train.steps"]:
            raise UserError(
                f"'{folder}' holds a run of {stored.train.steps} steps (it is at step {manifest.step}); it cannot "
                f"become shorter. Set train.steps={stored.train.steps} or more, or another run.dir."
            )
        hint = " To change the schedule at a checkpoint set run.switch=true." if switched else ""
        raise UserError(
            f"'{folder}' holds another run (step {manifest.step}); resuming it like this would change it:\n{lines}\n"
            f"Use the same settings, another run.dir, or run.fork_from={folder}.{hint}"
        )
    notes = [extension(stored, config, manifest.step)] if longer else []
    if switched:
        notes += [f"Switched at step {manifest.step}: {change}." for change in differences]
    return notes


def extension(stored: Config, config: Config, step: int) -> str:
    """What more steps than before do to the learning rate, in words."""
    before, after = (learning_rate(one)(min(step, one.train.steps - 1)) for one in (stored, config))
    text = f"Extended from {stored.train.steps} to {config.train.steps} steps. "
    if abs(before - after) < 0.005:
        return text + f"The learning rate goes on at {after:.0%} of its peak."
    return text + (
        f"The learning rate is that of a {config.optim.schedule} schedule over all {config.train.steps} steps from "
        f"here on: it goes from {before:.0%} to {after:.0%} of its peak at step {step}, so the result is not that of "
        f"a run that was {config.train.steps} steps long from its start."
    )


def _kept(manifest: checkpoint.Manifest) -> Config | None:
    """The config of a checkpoint; one of another version says so where it is compared."""
    try:
        return from_tree(manifest.says("config", dict))
    except UserError:
        return None


def _family(config: Config) -> str:
    """Schedules of one family give the same trajectory."""
    if config.synchronous or config.pipeline.delay == 0:
        return "synchronous"
    return f"delay {config.pipeline.delay}"

"""What runs left behind, read from run folders or from one compressed file: the same `Result` either way.

A folder of results holds run folders (`<labels>-<digest>`) and exports (`*.jsonl.gz`, one line per run:
its settings, the whole validation curve, a thinned training curve). Tables need
nothing else, so a study can be rebuilt from the small file alone. Invariant: a result is found by the
digest of its config, never by its labels.
"""

from __future__ import annotations

import gzip
import json
import statistics
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.config import Config, from_tree
from slipstream.config.load import keys
from slipstream.config.settings import SYNCHRONOUS, Reach
from slipstream.config.write import describe, flat
from slipstream.errors import UserError
from slipstream.formats import parse_json, parse_toml
from slipstream.metrics.events import Run, number, read_run, values
from slipstream.study.sweep import Point, digest, settings

FAILED_FILE = "failed.json"
TRAINING_POINTS = 200  # of a training curve in an export; each is the mean of its bucket
Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Result:
    """One ended run. Of one that failed, the figures say how far it had come."""

    digest: str
    run: str  # name of its folder
    settings: Mapping[str, Any]  # its resolved config, dotted keys
    loss: float | None = None  # final validation loss at the master; None: failed, or not finite
    failed: str = ""
    steps: int = 0
    tokens: float = 0
    seconds: float = 0.0
    tokens_per_second: float | None = None  # median of the second half
    skipped: int = 0
    parameters: int = 0
    validation: Curve = field(default_factory=list)  # (tokens, loss)
    training: Curve = field(default_factory=list)  # (tokens, loss), thinned and rounded: for the eye
    device: str = ""
    data: str = ""  # fingerprint of what it trained on
    held_out: str = ""  # and of what its losses were measured on; "": made before that was noted
    versions: Mapping[str, str | None] = field(default_factory=dict)
    commit: str = ""  # of the checkout it ran from; "": none, or made before that was noted
    source: str = ""  # fingerprint of the code that ran

    def same_text(self, other: Result) -> bool:
        """Whether the two read the same tokens; losses on two texts are no pair."""
        known = not self.held_out or not other.held_out or self.held_out == other.held_out
        return self.data == other.data and known

    def key(self, name: str, default: Any = None) -> Any:
        return self.settings.get(name, default)

    @property
    def synchronous(self) -> bool:
        """Whether none of its gradients is late."""
        delay = self.key("pipeline.delay", 1)
        late = any(delay) if isinstance(delay, list) else bool(delay)
        return not late or self.key("pipeline.schedule") in SYNCHRONOUS

    def setting(self, *but: str) -> dict[str, Any]:
        """What decides its numbers, `but` for some keys. A key that the run did not know has its default."""
        kept = {name: value for name, value in _deciding().items() if name not in but}
        return {name: self.settings.get(name, default) for name, default in kept.items()}

    @property
    def old(self) -> float:
        """The share of an update's microbatches that read old weights, over all stages: 1 without a cutover. After a
        fine start, if it has one."""
        cutover = self.key("pipeline.cutover")
        if cutover is None:
            return 1.0
        by_stage = cutover if isinstance(cutover, list) else [cutover]
        return min(1.0, sum(by_stage) / len(by_stage) / self.key("pipeline.microbatches"))


@cache
def _deciding() -> dict[str, Any]:
    defaults = flat(Config())
    return {key.name: defaults[key.name] for key in describe() if key.reach is Reach.TRAJECTORY}


def collect(*places: Path) -> dict[str, Result]:
    """Every ended run in folders and exports, by digest.

    Where two hold the same run a finished one goes before a failed one, then an earlier place before a later, a run
    folder before an export.
    """
    found: dict[str, Result] = {}
    for place in places:
        for result in _of_place(place):
            held = found.get(result.digest)
            if held is None or (held.failed and not result.failed):
                found[result.digest] = result
    return found


def _of_place(place: Path) -> Iterator[Result]:
    if place.is_file():
        yield from read_export(place)
        return
    for path in sorted(place.glob("*/")):
        if (result := read_folder(path)) is not None:
            yield result
    for path in sorted(place.glob("*.jsonl.gz")):
        yield from read_export(path)


def read_folder(folder: Path) -> Result | None:
    """A run folder's result; None while it has not ended, and for a folder that is no run."""
    if (folder / FAILED_FILE).exists():
        return _failure(folder)
    if not (folder / "config.toml").exists():
        return None
    run = read_run(folder)
    finish = run.last("finish")
    if run.status != "finished":
        return None
    try:
        config = from_tree(parse_toml(run.config))
    except (UserError, ValueError):
        return None  # of another version: run again
    loss = number(finish.get("validation_loss"))
    return Result(
        digest=digest(config),
        run=folder.name,
        settings=settings(config),
        loss=loss,
        failed="" if loss is not None else "the loss is not finite",
        steps=config.train.steps,
        tokens=config.train.steps * config.tokens_per_step,
        seconds=number(finish.get("seconds")) or 0.0,
        **_measured(run),
    )


def _measured(run: Run) -> dict[str, Any]:
    """What a run says of itself, however it ended."""
    steps, environment = run.surviving("step"), run.environment
    speeds = values(steps[len(steps) // 2 :], "tokens_per_second")
    data, versions = (
        found if isinstance(found := environment.get(key), dict) else {} for key in ("data", "versions")
    )
    return {
        "tokens_per_second": round(statistics.median(speeds), 1) if speeds else None,
        "skipped": sum(1 for row in steps if row.get("skipped")),
        "parameters": int(number(run.last("start").get("parameters")) or 0),
        "validation": _curve(run, "validation"),
        "training": [(x, round(y, 4)) for x, y in thinned(_curve(run, "step"))],
        "device": str(environment.get("device", "")),
        "data": str(data.get("fingerprint", "")),
        "held_out": str(data.get("validation_fingerprint", "")),
        "versions": versions,
        "commit": str(environment.get("commit") or ""),
        "source": str(environment.get("source") or ""),
    }


def write_failure(folder: Path, point: Point, message: str, trace: str = "") -> None:
    """Record that the run of `point` failed, even if it got no further than its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"digest": point.digest, "settings": settings(point.config), "failed": message, "trace": trace}
    (folder / FAILED_FILE).write_text(json.dumps(record, indent=1), encoding="utf-8")


def write_export(path: Path, results: Iterable[Result]) -> int:
    """One gzipped JSON line per run; the same bytes for the same results."""
    lines = [json.dumps(asdict(result), separators=(",", ":")) for result in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
    draft.replace(path)  # whole or not at all: what was there before may be all that is left of some runs
    return len(lines)


def read_export(path: Path) -> list[Result]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [parse_json(line) for line in file if line.strip()]
        return [_of_row(row) for row in rows]
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"'{path}' is no export of a study: {error}. Write it with `slipstream study export`."
        ) from None


def losses(results: Mapping[str, Result]) -> dict[str, float | None]:
    return {name: result.loss for name, result in results.items()}


def of_points(points: Sequence[Point], results: Mapping[str, Result]) -> list[Result]:
    """The results of the study's own runs, in its order."""
    return [results[point.digest] for point in points if point.digest in results]


def thinned(curve: Curve, points: int = TRAINING_POINTS) -> Curve:
    """At most `points` buckets of equal length: (last x, mean y)."""
    count = len(curve)
    if count <= points:
        return curve
    result: Curve = []
    for bucket in range(points):
        rows = curve[bucket * count // points : (bucket + 1) * count // points]
        result.append((rows[-1][0], statistics.fmean(y for _, y in rows)))
    return result


def _failure(folder: Path) -> Result | None:
    try:
        record = parse_json((folder / FAILED_FILE).read_text(encoding="utf-8"))
        result = Result(record["digest"], folder.name, record["settings"], failed=record["failed"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # cut off while it was written: run again
    return replace(result, **_before_it_failed(folder, result.digest))


def _before_it_failed(folder: Path, name: str) -> dict[str, Any]:
    """What the run `name` had measured by then; nothing where its log is missing, damaged or another run's."""
    try:
        run = read_run(folder)
        config = from_tree(parse_toml(run.config))
    except (OSError, UserError, ValueError):
        return {}
    steps = max((row["step"] for row in run.surviving("step")), default=0)
    # One line is cut off where a process was killed.
    whole = bool(run.of("start")) and run.unreadable <= 1 and 0 <= steps <= config.train.steps
    if not whole or digest(config) != name:
        return {}
    seconds = number(max(run.clock().values(), default=0.0)) or 0.0
    reached = {"steps": steps, "tokens": steps * config.tokens_per_step, "seconds": round(seconds, 3)}
    return _measured(run) | reached


def _curve(run: Run, kind: str) -> Curve:
    return list(zip(*run.series(kind, "loss", x="tokens"), strict=True))


def _of_row(row: Mapping[str, Any]) -> Result:
    """A line of an export. It may have come from anywhere: every figure is one, or it is a `ValueError`."""
    curves = {name: [(_finite(x), _finite(y)) for x, y in row[name]] for name in ("validation", "training")}
    loss, settings = number(row.get("loss")), _checked(dict(row["settings"]))
    failed = row.get("failed") or ("" if loss is not None else "the loss is not finite")
    checked: dict[str, Any] = {**row, **curves, "loss": loss, "settings": settings, "failed": failed}
    result = Result(**checked)
    for name in ("digest", "run", "failed", "device", "data", "held_out", "commit", "source"):
        if not isinstance(getattr(result, name), str):
            raise ValueError(f"{name} is {getattr(result, name)!r:.40}, not a text")
    for name in ("steps", "tokens", "seconds", "skipped", "parameters"):
        _finite(getattr(result, name))
    if result.tokens_per_second is not None:
        _finite(result.tokens_per_second)
    if not isinstance(result.versions, dict):
        raise ValueError("versions is no table")
    return result


def _finite(value: object) -> float:
    """As it was written: a whole number stays one."""
    if number(value) is None:
        raise ValueError(f"{value!r:.40} is not a number")
    assert isinstance(value, int | float)
    return value


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run; those that this version knows have values that it takes."""
    tree: dict[str, dict[str, Any]] = {}
    for key in set(keys()) & settings.keys():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = settings[key]
    from_tree(tree)
    return settings

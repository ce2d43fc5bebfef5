"""What `slipstream bench` does with its options: the works to measure, the ranks to run them on, the output."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from slipstream.bench.balance import measure_head_layers
from slipstream.bench.checks import check_device, make_room
from slipstream.bench.measure import ENGINE, bench, parse_rivals
from slipstream.bench.probe import probe
from slipstream.bench.report import print_probe, print_result, record
from slipstream.bench.timeline import check_plottable, draw, label
from slipstream.bench.work import Work
from slipstream.distributed import RankPool, partitioned
from slipstream.errors import UserError

CPU_SECONDS, GPU_SECONDS = 120.0, 60.0  # a sample that takes longer hangs


@dataclass(frozen=True)
class Request:
    """One run of the bench."""

    stages: int
    microbatches: list[int]
    kind: str
    device: str
    partitions: int | None
    preset: str
    rows: int
    sequence: int
    compile: bool
    clip: bool
    correction: str
    in_flight: int | None
    cutover: int | None
    link_latency_seconds: float
    rivals: str
    rounds: int | None
    updates: int | None

    def works(self) -> list[Work]:
        shape: dict[str, Any] = {}
        if self.kind == "language":
            if self.rows < 1 or self.sequence < 1:
                raise UserError(f"--rows {self.rows} and --sequence {self.sequence} must be at least 1.")
            shape = {"batch": self.rows, "tokens": self.sequence, "preset": self.preset}
        elif self.compile:
            raise UserError("--compile compiles a model's layers. Add --work language.")
        setting = Work(
            kind=self.kind,
            stages=self.stages,
            microbatches=max([self.stages, *self.microbatches]),
            max_grad_norm=1.0 if self.clip else None,
            correction=self.correction,
            in_flight=self.in_flight,
            cutover=self.cutover,
            link_latency_seconds=self.link_latency_seconds,
            device=self.device,
            compile=self.compile,
            **shape,
        )
        if self.kind == "language":
            setting.layers(range(self.stages))  # refuses a model that is not there, or has too few layers
        return [replace(setting, microbatches=count) for count in self.microbatches]


def run(request: Request, *, plot: Path | None, out: Path | None, as_json: bool) -> None:
    """Measure, and print or write each result as soon as it is known."""
    if plot is not None:
        check_plottable(plot)
    works, against = request.works(), parse_rivals(request.rivals)
    make_room(plot)
    make_room(out)
    check_device(request.device)
    on_gpu = request.device == "cuda"
    notes, console = Console(stderr=True, highlight=False), Console(highlight=False)
    cores = os.cpu_count() or 1
    if request.kind == "compute" and not on_gpu and request.stages > cores:
        notes.print(
            f"note: {request.stages} computing stages on {cores} cores measure the cores, not the schedules."
        )
    seconds = GPU_SECONDS if on_gpu else CPU_SECONDS
    rounds = (5 if on_gpu else 15) if request.rounds is None else request.rounds
    records = []
    with _ranks(request.stages, request.partitions) as pool, _progress(notes) as progress:
        if request.kind == "language":
            progress("measuring what the head is worth")
            head = measure_head_layers(pool, works[0], seconds)
            works = [replace(work, head_layers=round(head, 2)) for work in works]
        for result in bench(
            pool, works, against, rounds, request.updates, timeout_seconds=seconds, progress=progress
        ):
            records.append(record(result))
            if out is not None:
                out.write_text(json.dumps(records, indent=2) + "\n")
            if not as_json:
                print_result(console, result)
        if plot is not None:
            progress("timelines")
            for name, error in draw(pool, works[0], plot, [ENGINE, *against], seconds).items():
                notes.print(f"no timeline of {label(name)}: {error}", markup=False)
            notes.print(f"timelines: {plot}")
    if as_json:
        print(json.dumps(records, indent=2))


def run_probe(partitions: int, as_json: bool, out: Path | None) -> None:
    if partitions < 1:
        raise UserError(f"A GPU cannot be cut into {partitions} partitions. Set --partitions to 1 or more.")
    check_device("cuda")
    make_room(out)
    found = probe(partitions)
    if out is not None:
        out.write_text(json.dumps(found, indent=2) + "\n")
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print_probe(Console(highlight=False), found)


@contextlib.contextmanager
def _ranks(stages: int, partitions: int | None) -> Iterator[RankPool]:
    if partitions is None:
        with RankPool(stages) as pool:
            yield pool
        return
    with partitioned(partitions) as service:
        try:
            with RankPool(stages, service.environment) as pool:
                yield pool
        except UserError as error:
            raise UserError(f"{error}\nThe partitions' service said:\n{service.log()}") from error


@contextlib.contextmanager
def _progress(notes: Console) -> Iterator[Callable[[str], None]]:
    """What is being measured: a spinner on a terminal, else a line each."""
    if not notes.is_terminal:
        yield notes.print
        return
    with notes.status("starting") as status:
        yield status.update

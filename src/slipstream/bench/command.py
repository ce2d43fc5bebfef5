"""What `slipstream bench` does: measures, draws, prints and writes."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from slipstream.bench.balance import measure_head_layers
from slipstream.bench.checks import check_device, make_room
from slipstream.bench.contenders import BOUND, ENGINE, ENGINE_2BW, LABELS
from slipstream.bench.measure import LEAST_UPDATES, measure, parse_rivals
from slipstream.bench.probe import ranks_on
from slipstream.bench.report import print_result, record
from slipstream.bench.timeline import draw
from slipstream.bench.work import Work
from slipstream.distributed import RankPool, cores
from slipstream.errors import UserError
from slipstream.schedule.plot import FORMATS

# Machines for which torch is built with an allocator that keeps what was freed, so that the next contender's memory
# does not show; and what it is told, before it is loaded, not to.
KEEPS = ("aarch64", "arm64")
GIVES_BACK = {"MIMALLOC_PURGE_DELAY": "0"}
CPU_SECONDS, GPU_SECONDS = 120.0, 60.0  # a sample that takes longer hangs


def run(
    work: Work,
    counts: Sequence[int],
    *,
    partitions: int | None,
    rivals: str,
    rounds: int | None,
    updates: int | None,
    plot: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure `work` at each count of microbatches, and print or write each result as soon as it is known."""
    if plot is not None and plot.suffix.lower() not in FORMATS:
        raise UserError(f"--plot {plot}: end the file name in one of {', '.join(FORMATS)}.")
    works = [replace(work, microbatches=count) for count in counts]
    if work.kind == "language":
        work.layers(range(work.stages))  # refuses a model that is not there, or has too few layers
    against = parse_rivals(rivals)
    make_room(plot)
    make_room(out)
    check_device(work.device)
    on_gpu = work.device == "cuda"
    rounds = (5 if on_gpu else 15) if rounds is None else rounds
    if rounds < 1:
        raise UserError(f"--rounds {rounds}: a median needs 1 round or more.")
    if updates is not None and updates < LEAST_UPDATES:
        raise UserError(
            f"--updates {updates}: take {LEAST_UPDATES} or more, since the first and the last do not count."
        )
    notes, console = Console(stderr=True, highlight=False), Console(highlight=False)
    here = len(cores.allowed())
    if work.kind == "compute" and not on_gpu and work.stages > here:
        notes.print(
            f"note: {work.stages} computing stages on {here} cores measure the cores, not the schedules."
        )
    seconds = GPU_SECONDS if on_gpu else CPU_SECONDS
    records = []
    with (
        ranks_on(work.stages, partitions, work.device) as pool,
        RankPool(
            work.stages, GIVES_BACK | cores.environment(work.device)
        ) as tidy,  # starts no process unless it is used
        _progress(notes) as progress,
    ):
        if work.kind == "language":
            progress("measuring what the head is worth")
            head = measure_head_layers(pool, works[0], seconds)
            works = [replace(work, head_layers=round(head, 2)) for work in works]
        for work in works:
            m = work.microbatches
            result = measure(
                pool,
                work,
                [BOUND, *against, ENGINE, *([] if work.all_old else [ENGINE_2BW])],
                rounds=rounds,
                updates=updates or 2 + (max(5, 48 // m) if on_gpu else max(8, 64 // m)),
                timeout_seconds=seconds,
                progress=progress,
                alone=tidy if platform.machine() in KEEPS and not on_gpu else None,
            )
            records.append(record(result))
            if out is not None:
                out.write_text(json.dumps(records, indent=2) + "\n")
            if not as_json:
                print_result(console, result)
        if plot is not None:
            progress("timelines")
            for name, error in draw(pool, works[0], plot, [ENGINE, *against], seconds).items():
                notes.print(f"no timeline of {LABELS[name]}: {error}", markup=False)
            notes.print(f"timelines: {plot}")
    if as_json:
        print(json.dumps(records, indent=2))


@contextlib.contextmanager
def _progress(notes: Console) -> Iterator[Callable[[str], None]]:
    """What is being measured: a spinner on a terminal, else a line each."""
    if not notes.is_terminal:
        yield notes.print
        return
    with notes.status("starting") as status:
        yield status.update

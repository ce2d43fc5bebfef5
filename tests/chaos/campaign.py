"""Faults in small runs, one a case, and what becomes of them: `make chaos`, or from a checkout with `tests` on the path

    python -m chaos.campaign --cases 1000 --workers 12 --seconds 500 --out chaos.jsonl     a campaign, or more of it
    python -m chaos.campaign --seed 0 --case 17 --keep                                     one case of it again
    python -m chaos.campaign --table chaos.jsonl other.jsonl                               kinds x outcomes, as Markdown

A line is appended to `--out` when a case is over, and cases that are there already are not run again: the same command
goes on. Workers share nothing: each has its own folders, undisturbed runs and ports. What a fault needs and the machine
does not give (root: a disk or a line of its own) is recorded as not possible, and run by a later campaign that can.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import warm
from chaos import runs
from chaos.cases import NOT_POSSIBLE, Case, References, draw, perform, possible
from chaos.faults import Kind
from chaos.table import read, table

FINISH_SECONDS = 60.0  # for cases under way when the time is up; then they are dropped
LEAVE_SECONDS = 15.0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Faults in small runs, and what becomes of them.")
    parser.add_argument("--cases", type=int, default=100, help="so many numbers")
    parser.add_argument("--first", type=int, default=0, help="from this one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, default=None, help="only this one")
    parser.add_argument("--only", default=None, help="of these numbers, only kinds whose name holds this")
    parser.add_argument(
        "--each", action="store_true", help="the kinds in turn, one case each, instead of by chance"
    )
    parser.add_argument("--workers", type=int, default=1, help="cases at a time")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument(
        "--seconds",
        type=float,
        default=None,
        help=f"start no case later; {FINISH_SECONDS:g} s more to finish",
    )
    parser.add_argument("--out", type=Path, default=None, help="append a line of JSON for each case")
    parser.add_argument("--keep", action="store_true", help="keep the folders of cases with findings")
    parser.add_argument("--table", type=Path, nargs="+", default=None, help="print the table of such files")
    return parser.parse_args()


def wanted(given: argparse.Namespace, can: set[str]) -> Iterator[tuple[Case, Kind]]:
    """The cases that are still to be run, or to be recorded as not possible, by this worker."""
    known = read([given.out]) if given.out is not None and given.out.exists() else []
    before = {case["number"]: case["outcome"] for case in known if case["seed"] == given.seed}
    numbers = [given.case] if given.case is not None else range(given.first, given.first + given.cases)
    for number in numbers:
        case, kind = draw(given.seed, number, given.each)
        left_out = given.only is not None and given.only not in case.kind
        others = given.worker is not None and number % given.workers != given.worker
        again = before.get(number) == NOT_POSSIBLE and kind.needs in can
        if not left_out and not others and (number not in before or again):
            yield case, kind


def work(given: argparse.Namespace) -> list[dict[str, Any]]:
    """One case after another in this process."""
    began = time.monotonic()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    root, can = Path(tempfile.mkdtemp(prefix="chaos-")), possible()
    warm.use(tempfile.mkdtemp(prefix="w-", dir=root))
    warm.path()
    references, done = References(root), []
    try:
        for case, kind in wanted(given, can):
            if given.seconds is not None and time.monotonic() - began > given.seconds:
                break
            folder, started = root / f"case-{case.number}", time.monotonic()
            try:
                if kind.needs in can:
                    perform(case, kind, folder, references)
                else:
                    case.outcome = NOT_POSSIBLE
            except Exception as error:
                if warm._server[0].poll() is not None:
                    raise  # every case after this one would fail too
                case.findings.append(f"{type(error).__name__}: {error}")
            case.seconds = round(time.monotonic() - started, 2)
            done.append(asdict(case))
            _record(given, case)
            if not (given.keep and case.findings):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        runs.end_all()
        warm.close()
        if not given.keep:
            shutil.rmtree(root, ignore_errors=True)
    return done


def _record(given: argparse.Namespace, case: Case) -> None:
    if given.out is not None:
        file = os.open(given.out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, (json.dumps(asdict(case)) + "\n").encode())  # in one piece: other workers append too
        os.close(file)
    layout = f"P={case.stages} D={case.data_ranks} then P={case.stages_after}"
    findings = " | ".join(case.findings)
    sys.stdout.write(
        f"{case.number:5} {case.kind:38} {layout}  {case.outcome or '-'}  {case.seconds} s {findings}\n"
    )
    sys.stdout.flush()


def share_out(given: argparse.Namespace) -> None:
    """Workers, each a process with the numbers that are its own; none of them outlives the time by much."""
    assert given.out is not None
    words = [sys.executable, "-m", "chaos.campaign", *sys.argv[1:]]
    workers = [subprocess.Popen([*words, "--worker", str(number)]) for number in range(given.workers)]
    until = None if given.seconds is None else time.monotonic() + given.seconds + FINISH_SECONDS
    try:
        for worker in workers:
            worker.wait(None if until is None else max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        print("The time is up: cases under way are dropped, and not recorded.", flush=True)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            try:
                worker.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
    broken = [worker.returncode for worker in workers if worker.returncode not in (0, 1, STOPPED)]
    if broken:
        print(f"Workers ended with {broken}: their cases are not all recorded.", flush=True)


STOPPED = 143  # told to stop, and everything that was started is gone


def main() -> None:
    given = options()
    if given.table is not None:
        print(table(read(given.table)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    if given.workers > 1 and given.worker is None:
        if given.out is None:
            sys.exit("Several workers write to one file: give --out.")
        share_out(given)
        done = [case for case in read([given.out]) if case["seed"] == given.seed]
    else:
        done = work(given)
    if given.worker is None:
        print(table(done))
    sys.exit(any(case["findings"] for case in done))


if __name__ == "__main__":
    main()

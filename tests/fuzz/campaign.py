"""Feed damaged input to every reader and count what comes of it: `python -m fuzz.campaign --inputs 20000 --seed 0`.

An input may be accepted, or refused in words (a `UserError`, or an exit of the command line). Anything else is a
finding: another exception, a processor second too many, a file changed that was only to be read. Each is printed with
the seed that makes it again: `--only TARGET --first N --inputs 1`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fuzz.targets import TARGETS, Target
from slipstream.errors import UserError

LIMIT_SECONDS = 20.0  # of processor time: a busy machine is no hang
MEMORY_BYTES = 8 << 30


class Hang(BaseException):
    """No handler of ours takes this for an error of the input."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise Hang(f"more than {LIMIT_SECONDS:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def picture(folder: Path) -> dict[str, str]:
    """What every file of a folder holds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def attempt(target: Target, seeds: Path, folder: Path, seed: int) -> tuple[str, str]:
    """(outcome, details): "accepted", "refused", or a finding."""
    rng = random.Random(f"{target.name} {seed}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(seeds, folder)
    target.change(rng, folder)
    before = picture(folder) if target.reads_only else {}
    here, said = os.getcwd(), io.BytesIO()
    out, err = (
        io.TextIOWrapper(said, encoding="utf-8", errors=errors, write_through=True)
        for errors in ("strict", "backslashreplace")  # as Python opens them
    )
    os.chdir(folder)
    try:
        with limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            target.use(rng, folder)
        outcome, details = "accepted", ""
    except UserError as error:
        outcome, details = "refused", str(error)
    except SystemExit as error:
        outcome, details = ("accepted" if error.code in (0, None) else "refused"), said.getvalue().decode()
    except Hang as error:
        return "hang", f"{error}\n{traceback.format_exc()}"
    except BaseException as error:
        return "traceback", f"{type(error).__name__}: {error}"[:300] + "\n" + traceback.format_exc()
    finally:
        os.chdir(here)
    if changed := [name for name, held in before.items() if picture_of(Path(name)) != held]:
        return "damage", f"changed: {changed[:3]}"
    if outcome == "refused" and not details.strip():
        return "silence", "refused without a word"
    if b"Traceback (most recent call last)" in said.getvalue():
        return "traceback", said.getvalue().decode()
    return outcome, details


def picture_of(path: Path) -> str | None:
    if path.is_symlink():
        return os.readlink(path)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def seeds_of(target: Target, root: Path) -> Path:
    """The valid files, and proof that they are."""
    seeds = root / "seeds" / target.name.replace(" ", "-").replace(",", "")
    if not seeds.exists():
        seeds.mkdir(parents=True)
        with contextlib.redirect_stdout(io.StringIO()):
            target.make(seeds)
    return seeds


def numbers(target: Target, inputs: int) -> int:
    whole = sum(one.share for one in TARGETS)
    return max(1, -(-inputs * target.share // whole))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default=None)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    counts: dict[str, Counter[str]] = {}
    slowest: dict[str, float] = {}
    findings: dict[str, str] = {}
    try:
        for target in TARGETS:
            if given.only is not None and target.name != given.only:
                continue
            seeds = seeds_of(target, root)
            count = numbers(target, given.inputs) if given.only is None else given.inputs
            counts[target.name] = Counter()
            for number in range(given.first, given.first + count):
                seed = given.seed * 10_000_000 + number
                began = time.process_time()
                outcome, details = attempt(target, seeds, root / "work", seed)
                slowest[target.name] = max(slowest.get(target.name, 0.0), time.process_time() - began)
                counts[target.name][outcome] += 1
                if outcome not in ("accepted", "refused"):
                    key = f"{target.name}: {outcome}: {_last_place(details)}"
                    if key not in findings:
                        findings[key] = f"number {number}\n{details}"
                        print(f"\n=== {key}\nnumber {number}\n{details[-1800:]}", file=sys.stderr, flush=True)
            print(
                f"{target.name:36} {dict(counts[target.name])} slowest {slowest[target.name]:.1f} s",
                flush=True,
            )
    finally:
        shutil.rmtree(root, ignore_errors=True)
    total = sum(sum(counter.values()) for counter in counts.values())
    print(f"{total} inputs, {len(findings)} kinds of findings")
    if given.out is not None:
        record = {
            name: {**counter, "slowest_seconds": round(slowest[name], 2)} for name, counter in counts.items()
        }
        given.out.write_text(
            json.dumps({"seed": given.seed, "inputs": total, "targets": record}, indent=1) + "\n"
        )
    sys.exit(1 if findings else 0)


def _last_place(details: str) -> str:
    """Where it was raised: what tells one finding from another."""
    lines = [
        line.strip()
        for line in details.splitlines()
        if line.strip().startswith("File ") and "slipstream/" in line
    ]
    return (lines[-1] if lines else "") + " " + details.split(":")[0][:60]


if __name__ == "__main__":
    main()

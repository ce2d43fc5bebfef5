"""The rung of 30M in half an hour of one GPU: whole runs share it, two of them first, and short ones fill what is left.

    python studies/ladder_30m.py TRAIN.txt VALID.txt OUT [--seconds 1640] [--also FILE] [KEY=VALUE ...]

Two of these runs keep an H200 as busy as four do. All four start at once, and the two that say most go first on the
GPU (by the priorities of CUDA's MPS, for which each is a `slipstream study run` of its own): they end early, and the
others take what they leave. Whatever has ended is in OUT/ladder-30m.jsonl.gz from then on. What still runs at the
deadline is stopped; another call, on another machine too, does the rest. There it takes that file as --also and the
same OUT, since a run is known by its settings, and they name the tokens.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

STUDY = Path(__file__).with_name("ladder-30m.toml")
WHOLE = {  # --only of each; what says most by itself first
    "sync": "length=whole*mode=sync",
    "ef": "length=whole*mode=ef",
    "third": "length=whole*mode=ef 1/3",
    "delay": "length=whole*mode=delay",
}
SHORT = {
    "low-ef": "length=eighth*lr=0.004*mode=ef",
    "low-sync": "length=eighth*lr=0.004*mode=sync",
    "ef-8": "length=eighth*lr=0.008*mode=ef",
    "sync-8": "length=eighth*lr=0.008*mode=sync",
}
FIRST = {"sync", "ef"}
WHOLE_SECONDS, SHORT_SECONDS = 560, 90  # that a run needs at least
SHARE_SECONDS = 350  # of the whole GPU that a whole run takes, beside others
GRACE = 20  # seconds to write down what is known
TOLD_EVERY = 60


class Lease:
    """The machine, until a deadline."""

    def __init__(self, out: Path, seconds: float, settings: list[str], also: list[Path]) -> None:
        self.out, self.settings, self.also = out.resolve(), settings, also
        self._deadline = time.monotonic() + seconds
        self._runs: dict[str, subprocess.Popen[bytes]] = {}
        (self.out / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        return self._deadline - time.monotonic()

    def call(self, *arguments: str, check: bool = True) -> None:
        subprocess.run([sys.executable, "-m", "slipstream", *arguments], check=check)

    def start(self, name: str, only: str, priority: int) -> None:
        command = ["study", "run", str(STUDY), *self.settings, "--workers", "1", "--only", only]
        command += [part for place in self.also for part in ("--also", str(place))]
        with (self.out / "logs" / name).open("wb") as log:
            self._runs[name] = subprocess.Popen(
                [sys.executable, "-m", "slipstream", *command, "--out", str(self.out / "runs" / name)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"CUDA_MPS_CLIENT_PRIORITY": str(priority), "OMP_NUM_THREADS": "1"},
            )

    def busy(self) -> list[str]:
        return [name for name, run in self._runs.items() if run.poll() is None]

    def keep(self) -> None:
        """Write down what has ended, in a file that is small enough to be sent for."""
        places = [*self.also, *(self.out / "runs").glob("*")]
        named = [part for place in places for part in ("--results", str(place))]
        self.call("study", "export", str(STUDY), *self.settings, *named, "--out", str(self.out), check=False)

    def tell(self) -> None:
        print(f"{self.left:.0f} s left", flush=True)
        for log in sorted((self.out / "logs").iterdir()):
            # How far a run is stands in the log of the process that trains it, which comes a little later.
            trains = self.out / "runs" / log.name / "worker-0.log"
            print(f"  {log.name}: {_last_line(trains) or _last_line(log)}", flush=True)

    def stop(self) -> None:
        for run in self._runs.values():
            run.terminate()
        until = time.monotonic() + GRACE
        for run in self._runs.values():
            try:
                run.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                run.kill()


def _last_line(log: Path) -> str:
    text = log.read_text(errors="replace") if log.is_file() else ""
    return next((line[-160:] for line in reversed(text.splitlines()) if line.strip()), "")


def serve(out: Path) -> bool:
    """Start CUDA's MPS, by which processes run on one GPU at the same time instead of in turns."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return False
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        (folder := out / name.lower()).mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(folder)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    return True


def next_run(waiting: list[str], busy: list[str], left: float) -> str | None:
    """The run to start now: every whole one, then short ones, two at once with at most one whole one among them."""
    sharing = 1 + len({*busy} & {*WHOLE})
    whole = max(WHOLE_SECONDS, SHARE_SECONDS * sharing)
    seconds = {name: whole if name in WHOLE else SHORT_SECONDS for name in waiting}
    name = next((name for name in waiting if seconds[name] <= left), None)
    return None if name in SHORT and len(busy) >= 2 else name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", help="text, as `slipstream data prepare` takes it")
    parser.add_argument("valid")
    parser.add_argument("out", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seconds", type=float, default=1640)
    parser.add_argument("--also", type=Path, action="append", default=[], help="what need not be run again")
    asked = parser.parse_intermixed_args()
    tokens = asked.out.resolve() / "tokens"
    settings = [f"data.path={tokens}", "train.cuda_graphs=true", *asked.settings]
    lease = Lease(asked.out, asked.seconds, settings, asked.also)
    served = serve(lease.out)
    if not tokens.exists():
        files = [asked.train, "--valid", asked.valid]
        lease.call("data", "prepare", *files, "--vocab", "8192", "--out", str(tokens))
    lease.call("study", "warm", str(STUDY), *lease.settings)
    all_runs = WHOLE | SHORT
    waiting, busy, told = [*all_runs], [], lease.left
    while lease.left > GRACE:
        while name := next_run(waiting, lease.busy(), lease.left):
            waiting.remove(name)
            lease.start(name, all_runs[name], priority=int(name not in FIRST))
        before, busy = busy, lease.busy()
        if {*before} - {*busy}:
            lease.keep()
        if not busy and next_run(waiting, busy, lease.left) is None:
            break
        if told - lease.left > TOLD_EVERY:
            told = lease.left
            lease.tell()
        time.sleep(1)
    lease.stop()
    lease.keep()
    lease.tell()
    if served:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False)


if __name__ == "__main__":
    main()

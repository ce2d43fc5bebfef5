"""What the training loop costs beyond the engine: the trainer against the bare `Schedule2BW`, in turns.

Both contenders are assembled from one config, by the same code, on the same ranks: the same model, microbatches,
optimizer and correction. *trainer* is the whole loop (data read ahead, learning rate, losses and norms collected,
events.jsonl, a line per step); *bare* hands the engine batches that lie ready and nothing else.

    ratio = bare seconds per update / trainer seconds per update          1: the loop costs nothing

The trainer runs as always, but between two of its groups, every few updates, the bare engine takes as many: shared
cores are slow for a second at a time, and so both are. A turn is timed between two calls of the engine, `WARM_UP` and
`WARM_UP + updates` groups in: neither start, drain, validation nor checkpoints are in it.

    python -m slipstream.bench.overhead [--config RUN.TOML] [KEY=VALUE]...
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from slipstream.bench.probe import ranks_on
from slipstream.config import Config, from_tree, load, resolve
from slipstream.distributed import World
from slipstream.errors import UserError
from slipstream.train import batches, fine
from slipstream.train.assemble import assemble, position_of
from slipstream.train.board import Board
from slipstream.train.engine import losses_of
from slipstream.train.folder import Plan
from slipstream.train.sources import data_folder
from slipstream.train.trainer import RunParts, train

CONTENDERS = ("bare", "trainer")
WARM_UP = 2  # groups of a turn that fill the pipeline
READY = 8  # different batches that the bare loop cycles through


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one update on one rank."""

    seconds: float
    cpu_seconds: float  # of all threads of the process


def compare(config: Config, rounds: int, updates: int) -> dict[str, Any]:
    """`rounds` turns of each contender; medians, and every round."""
    if config.pipeline.schedule != "2bw":
        raise UserError(
            f"The bare loop is Schedule2BW: set pipeline.schedule to 2bw, not '{config.pipeline.schedule}'."
        )
    if rounds < 1 or updates < 1:
        raise UserError(f"--rounds {rounds} and --updates {updates}: take 1 of each or more.")
    with (
        tempfile.TemporaryDirectory(prefix="slipstream-overhead-") as folder,
        ranks_on(config.ranks, device=config.train.device) as pool,
    ):
        tree = _quiet(config, Path(folder), steps_of(rounds, updates)).model_dump()
        job = "slipstream.bench.overhead:take_turns"
        return _summary(pool.run(job, tree, updates, timeout=config.train.timeout_seconds * rounds))


def steps_of(rounds: int, updates: int) -> int:
    """The trainer's: what comes before the first turn chooses the depth; the last turn ends at a call of its own."""
    return (rounds + 1) * (WARM_UP + updates) + 1


def take_turns(world: World, tree: dict[str, Any], updates: int) -> dict[str, list[Cost]]:
    """One rank: for each contender, its turns."""
    config = from_tree(tree)
    with _assembled(config, world, "bare") as bare, _assembled(config, world, "trainer") as parts:
        turns = _Turns(parts, bare, updates)
        train(parts, 0, 0, threading.Event())
        bare.engine.drain()
    return turns.costs


@contextlib.contextmanager
def _assembled(config: Config, world: World, name: str) -> Iterator[RunParts]:
    folder = Path(config.run.dir) / name
    folder.mkdir(parents=True, exist_ok=True)
    config = config.changed(run={"dir": str(folder)})
    plan = Plan(data_fingerprint="not recorded", nonce=f"overhead-{name}")
    board = Board(world.store, config.train.timeout_seconds)
    with (
        (folder / f"lines-{world.rank}.txt").open("w", encoding="utf-8") as lines,
        contextlib.redirect_stdout(lines),
        assemble(config, world, position_of(config, world), data_folder(config), plan, board) as parts,
    ):
        yield parts


class _Turns:
    """Stands before the trainer's engine. All ranks call it for the same groups, so all take the same turns."""

    def __init__(self, parts: RunParts, bare: RunParts, updates: int) -> None:
        self.costs: dict[str, list[Cost]] = {name: [] for name in CONTENDERS}
        self._engine, self._bare, self._updates = parts.engine, bare.engine, updates
        self._ready = [
            batches.load(bare.train_data, group, bare.share).to(bare.device) for group in range(READY)
        ]
        self._calls = -(WARM_UP + updates)  # of the turn; the first one is not timed
        self._began: tuple[float, float] | None = None
        self._step = parts.engine.step
        parts.engine.step = self.step

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if self._calls == WARM_UP:
            self._began = _clocks()
        elif self._calls == WARM_UP + self._updates:
            assert self._began is not None
            self.costs["trainer"].append(self._cost(self._began))
        if self._calls in (0, WARM_UP + self._updates):
            self._engine.drain()
            self._bare_turn()
            self._calls = 0
        self._calls += 1
        return self._step(*args, **kwargs)

    def _bare_turn(self) -> None:
        began = None
        for call in range(WARM_UP + self._updates):
            if call == WARM_UP:
                began = _clocks()
            losses_of(self._bare.step, self._ready[call % READY])
        assert began is not None
        self.costs["bare"].append(self._cost(began))
        self._bare.drain()

    def _cost(self, began: tuple[float, float]) -> Cost:
        seconds, cpu_seconds = (now - then for now, then in zip(_clocks(), began, strict=True))
        return Cost(seconds / self._updates, cpu_seconds / self._updates)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _quiet(config: Config, folder: Path, steps: int) -> Config:
    """The run with nothing in it but steps: lines go on being printed, into a file of their own. On a GPU, where turns
    are too short to try depths, it has the least."""
    on_gpu = config.train.device != "cpu" and torch.cuda.is_available()
    in_flight = config.pipeline.in_flight or (config.stages if on_gpu else None)
    return fine.stretch(config, config.train.steps).changed(
        run={"dir": str(folder)},
        pipeline={"in_flight": in_flight, "fine_start": 0.0, "fine_microbatches": None},
        train={"steps": steps, "eval_every": 0, "eval_batches": 1, "sample_tokens": 0},
        checkpoint={"every": 0, "keep": 0},
    )


def _summary(ranks: Sequence[dict[str, list[Cost]]]) -> dict[str, Any]:
    """The slowest rank counts in the time, all ranks together in the processor time."""
    turns = {name: list(zip(*(rank[name] for rank in ranks), strict=True)) for name in CONTENDERS}
    # The last of the bare engine's turns is followed by none of the trainer's.
    turns = {name: taken[: len(turns["trainer"])] for name, taken in turns.items()}
    times = {name: [max(c.seconds for c in turn) * 1e3 for turn in taken] for name, taken in turns.items()}
    cpu = {name: [sum(c.cpu_seconds for c in turn) * 1e3 for turn in taken] for name, taken in turns.items()}
    ratios = [bare / whole for bare, whole in zip(times["bare"], times["trainer"], strict=True)]
    return {
        "ratio": median(ratios),
        "ratios": ratios,
        "ms": {name: median(values) for name, values in times.items()},
        "cpu_ms": {name: median(values) for name, values in cpu.items()},
        "cpu_ratio": median(bare / whole for bare, whole in zip(cpu["bare"], cpu["trainer"], strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The trainer against the bare Schedule2BW, in turns.")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="the run to measure; default: the CPU's"
    )
    parser.add_argument("--config", help="a run's TOML file")
    parser.add_argument("--rounds", type=int, default=25, help="turns of each; the median counts")
    parser.add_argument("--updates", type=int, default=6, help="updates timed in a turn")
    parser.add_argument("--json", dest="as_json", action="store_true")
    given = parser.parse_args()
    try:
        result = compare(resolve(load(given.config, given.overrides)), given.rounds, given.updates)
    except UserError as error:
        parser.error(str(error))
    if given.as_json:
        print(json.dumps(result, indent=2))
        return
    ms, cpu = result["ms"], result["cpu_ms"]
    ratios = sorted(result["ratios"])
    middle = f"{ratios[len(ratios) // 4]:.1%} to {ratios[-1 - len(ratios) // 4]:.1%}"
    print(f"bare Schedule2BW {ms['bare']:.1f} ms an update, trainer {ms['trainer']:.1f} ms")
    print(
        f"the trainer runs at {result['ratio']:.1%} of the bare loop (half of {len(ratios)} rounds: {middle})"
    )
    print(f"processor time an update, all ranks: bare {cpu['bare']:.1f} ms, trainer {cpu['trainer']:.1f} ms")


if __name__ == "__main__":
    main()

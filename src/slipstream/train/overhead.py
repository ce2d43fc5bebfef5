"""What the training loop costs beyond the engine: the trainer against the bare `Schedule2BW`, in the same run.

Both contenders are assembled from one config, by the same code, on the same ranks: the same model, microbatches,
optimizer and correction. *trainer* is the whole loop (data read ahead, learning rate, losses and norms collected,
events.jsonl, a line per step); *bare* hands the engine batches that lie ready and nothing else. They take turns, and
so does the order within a turn, so that a machine that slows down slows down both.

    ratio = bare seconds per update / trainer seconds per update          1: the loop costs nothing

Timed between two calls of the engine, `warmup` and `warmup + updates` groups in: neither start, drain, validation nor
checkpoints are in it.

    python -m slipstream.train.overhead [--config RUN.TOML] [KEY=VALUE]...
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.config import Config, from_tree, load, resolve
from slipstream.distributed import RankPool, World
from slipstream.errors import UserError
from slipstream.train import batches, build
from slipstream.train.assemble import assemble, seat_of
from slipstream.train.board import SharedBoard
from slipstream.train.engine import Engine
from slipstream.train.folder import Plan
from slipstream.train.trainer import Parts, train

CONTENDERS = ("bare", "trainer")
READY = 8  # different batches that the bare loop cycles through


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one update on one rank."""

    seconds: float
    cpu_seconds: float  # of all threads of the process


def compare(config: Config, rounds: int, updates: int, warmup: int = 5) -> dict[str, Any]:
    """Alternate the contenders `rounds` times on new ranks; medians, and every round."""
    if config.pipeline.schedule != "2bw":
        raise UserError(
            f"The bare loop is Schedule2BW: set pipeline.schedule to 2bw, not '{config.pipeline.schedule}'."
        )
    assert config.pipeline.stages is not None
    ranks = config.pipeline.stages * config.pipeline.data_ranks
    samples: dict[str, list[list[Cost]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="slipstream-overhead-") as folder, RankPool(ranks) as pool:
        for number in range(rounds):
            for name in CONTENDERS if number % 2 else CONTENDERS[::-1]:
                tree = _quiet(config, Path(folder) / f"{name}-{number}", warmup + updates + 1).model_dump()
                samples[name].append(
                    pool.run("slipstream.train.overhead:take_sample", tree, name, warmup, updates)
                )
    return _summary(samples)


def take_sample(world: World, tree: dict[str, Any], name: str, warmup: int, updates: int) -> Cost:
    """One rank of one contender."""
    config = from_tree(tree)
    data = build.data_folder(config)
    seat, board = seat_of(config, world), SharedBoard(world.store, config.train.timeout_seconds)
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    plan = Plan(0, None, False, False, 0, "not recorded", "overhead")
    with (
        (Path(config.run.dir) / f"lines-{world.rank}.txt").open("w", encoding="utf-8") as lines,
        contextlib.redirect_stdout(lines),
        assemble(config, world, seat, data, plan, board) as parts,
    ):
        clock = _Clock(parts.engine, warmup, updates)
        if name == "trainer":
            train(parts, 0, 0, threading.Event())
        else:
            _bare(parts)
    return clock.cost()


def _bare(parts: Parts) -> None:
    ready = [batches.load(parts.train_data, group, parts.place).to(parts.device) for group in range(READY)]
    for step in range(parts.config.train.steps):
        parts.engine.step(ready[step % READY])
    parts.engine.drain()


class _Clock:
    """Reads the clocks when the engine is called for the group after `warmup`, and `updates` calls later."""

    def __init__(self, engine: Engine, warmup: int, updates: int) -> None:
        self._readings: dict[int, tuple[float, float]] = {}
        self._calls, self._marks = 0, (warmup, warmup + updates)
        step = engine.step

        def timed(batch: batches.Batch) -> Any:
            if self._calls in self._marks:
                self._readings[self._calls] = time.perf_counter(), time.process_time()
            self._calls += 1
            return step(batch)

        engine.step = timed

    def cost(self) -> Cost:
        (first, first_cpu), (last, last_cpu) = (self._readings[mark] for mark in self._marks)
        updates = self._marks[1] - self._marks[0]
        return Cost((last - first) / updates, (last_cpu - first_cpu) / updates)


def _quiet(config: Config, folder: Path, steps: int) -> Config:
    """The run with nothing in it but steps: lines go on being printed, into a file of their own."""
    changes = {
        "run": config.run.model_copy(update={"dir": str(folder)}),
        "train": config.train.model_copy(
            update={"steps": steps, "eval_every": 0, "eval_batches": 1, "sample_tokens": 0}
        ),
        "checkpoint": config.checkpoint.model_copy(update={"every": 0, "keep": 0}),
    }
    return config.model_copy(update=changes)


def _summary(samples: dict[str, list[list[Cost]]]) -> dict[str, Any]:
    """The slowest rank counts in the time, all ranks together in the processor time."""
    times = {
        name: [max(rank.seconds for rank in ranks) * 1e3 for ranks in rounds]
        for name, rounds in samples.items()
    }
    cpu = {
        name: [sum(rank.cpu_seconds for rank in ranks) * 1e3 for ranks in rounds]
        for name, rounds in samples.items()
    }
    ratios = [bare / whole for bare, whole in zip(times["bare"], times["trainer"], strict=True)]
    return {
        "ratio": median(ratios),
        "ratios": ratios,
        "ms": {name: median(values) for name, values in times.items()},
        "cpu_ms": {name: min(values) for name, values in cpu.items()},
        "cpu_ratio": min(cpu["bare"]) / min(cpu["trainer"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The trainer against the bare Schedule2BW, in turns.")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="the run to measure; default: the CPU's"
    )
    parser.add_argument("--config", help="a run's TOML file")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each; the median counts")
    parser.add_argument("--updates", type=int, default=40, help="updates timed in a turn")
    parser.add_argument("--json", dest="as_json", action="store_true")
    given = parser.parse_args()
    result = compare(resolve(load(given.config, given.overrides)), given.rounds, given.updates)
    if given.as_json:
        print(json.dumps(result, indent=2))
        return
    ms, cpu = result["ms"], result["cpu_ms"]
    rounds = ", ".join(f"{ratio:.1%}" for ratio in result["ratios"])
    print(f"bare Schedule2BW {ms['bare']:.1f} ms an update, trainer {ms['trainer']:.1f} ms")
    print(f"the trainer runs at {result['ratio']:.1%} of the bare loop (rounds: {rounds})")
    print(f"processor time an update, all ranks: bare {cpu['bare']:.1f} ms, trainer {cpu['trainer']:.1f} ms")


if __name__ == "__main__":
    main()

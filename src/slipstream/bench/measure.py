"""Interleaved, repeated rounds: every contender is timed once per round, in an order that rotates.

First each contender runs alone, which shows its memory, and whether it runs at all: a schedule of torch's that fails
(on a GPU: any contender) is reported with its error and takes no further part. The others are then built side by side
and take turns of a few updates, since cores are fast or slow for a second at a time; on a GPU whose memory they would
fill together, every sample is of a contender alone. The period of a sample is that of the steady state; fill and drain
are what is left of the wall clock before the last stage's first update and after it:

    wall = fill + updates * period + drain
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import torch

from slipstream.bench.contenders import BOUND, ENGINE, ENGINE_2BW, RIVALS
from slipstream.bench.sample import RankSample, rotated, take_sample, take_turns
from slipstream.bench.work import Work
from slipstream.distributed import RankPool
from slipstream.errors import UserError, did_you_mean

LEAST_UPDATES = 4  # of a sample: the first and the last do not count
WARM_UP_UPDATES = 4  # at least: until our schedule has chosen its depth (`sample.py`)
SHARE_TOGETHER = 0.7  # of a GPU's memory; the rest is for what allocators keep in pieces
ROUNDS_TOGETHER = 5
GPU_WARM_UP_UPDATES = 2  # of the others, on a GPU: its time is dear, and the processes are warm
Progress = Callable[[str], None]
NOT_APPLICABLE = "not applicable"
NO_LATENCY = "not run: torch's schedules have no injected link latency"


@dataclass(frozen=True)
class Sample:
    """One contender, one round, all ranks together."""

    period_seconds: float
    fill_seconds: float
    drain_seconds: float
    cpu_seconds: tuple[float, ...]  # per update, of each rank
    in_flight: int | None = None  # of a contender that chooses it


@dataclass
class Result:
    """Everything measured at one number of microbatches."""

    work: Work
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    peak_memory_bytes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of each rank, alone
    held_bytes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the same, with nothing in flight
    errors: dict[str, str] = field(default_factory=dict)
    carrier: str | None = None  # what took tensors from stage to stage

    @property
    def together_bytes(self) -> int:
        """Of a GPU that all ranks share, when all contenders are there and one of them is at work."""
        peaks, held = list(self.peak_memory_bytes.values()), list(self.held_bytes.values())
        return sum(
            sum(rest) + max(most - rest[i] for i, most in enumerate(peak))
            for peak, rest in zip(zip(*peaks, strict=True), zip(*held, strict=True), strict=True)
        )

    def milliseconds(self, name: str) -> float | None:
        """Median time per update, or None where the contender did not finish."""
        samples = self.samples.get(name)
        return median(sample.period_seconds for sample in samples) * 1e3 if samples else None


def parse_rivals(text: str) -> list[str]:
    """`all`, `none`, or a list of rivals without their prefix: `1f1b,zbv`."""
    if text in ("all", "none"):
        return list(RIVALS) if text == "all" else []
    known = {rival.removeprefix("torch_"): rival for rival in RIVALS}
    names = [part.strip() for part in text.split(",")]
    for name in (name for name in names if name not in known):
        raise UserError(
            f"There is no rival '{name}'.{did_you_mean(name, known)} "
            f"Set --rivals to all, none, or a list of {', '.join(known)}."
        )
    return [known[name] for name in names]


def measure(
    pool: RankPool,
    work: Work,
    contenders: Sequence[str],
    *,
    rounds: int,
    updates: int,
    timeout_seconds: float,
    progress: Progress = lambda _: None,
    alone: RankPool | None = None,
) -> Result:
    """Sample every contender `rounds` times; `updates` updates a sample. `alone`: ranks that show their memory."""
    result = Result(work)
    for name in (name for name in contenders if name in RIVALS):
        if work.link_latency_seconds > 0:
            result.errors[name] = NO_LATENCY
        elif reason := RIVALS[name].not_applicable(work.stages, work.microbatches):
            result.errors[name] = f"{NOT_APPLICABLE}: {reason}"
    taker = _Taker(pool, result, timeout_seconds, progress)
    first = replace(taker, pool=pool if alone is None else alone)
    first.warm_up()
    first.alone(contenders, 1, LEAST_UPDATES)
    result.samples = {name: [] for name in result.samples}
    if work.device == "cpu" or result.together_bytes < SHARE_TOGETHER * _device_bytes():
        taker.in_turns(rounds, updates)
    else:
        taker.alone(contenders, rounds, updates)
    return result


def _device_bytes() -> int:
    return torch.cuda.get_device_properties(0).total_memory


@dataclass(frozen=True)
class _Taker:
    """Takes the samples of one work on the ranks of a pool, into its result."""

    pool: RankPool
    result: Result
    timeout_seconds: float
    progress: Progress

    def warm_up(self) -> None:
        """A process's first sample pays for lazy loading, in time and in memory: throw one away."""
        work = self.result.work
        if work.device == "cuda":
            work = replace(work, microbatches=work.stages)
        self._run(1, take_sample, BOUND, work, GPU_WARM_UP_UPDATES, 2)

    def alone(self, names: Sequence[str], rounds: int, updates: int) -> None:
        result, on_cpu = self.result, self.result.work.device == "cpu"
        for turn in range(rounds):
            for name in rotated([name for name in names if name not in result.errors], turn):
                self._tell(turn, 1, rounds, f"alone: {name}")
                ours = name in (ENGINE, ENGINE_2BW)
                warm_up = WARM_UP_UPDATES if ours or on_cpu else GPU_WARM_UP_UPDATES
                try:
                    ranks = self._run(1, take_sample, name, result.work, warm_up, updates)
                except UserError as error:
                    if name not in RIVALS and on_cpu:
                        raise
                    result.errors[name] = str(error)
                    for found in (result.samples, result.peak_memory_bytes, result.held_bytes):
                        found.pop(name, None)
                    self.warm_up()  # ranks that hung were replaced by new processes
                else:
                    result.carrier = ranks[0].carrier
                    result.samples.setdefault(name, []).append(summarise(name, ranks))
                    result.peak_memory_bytes.setdefault(name, tuple(rank.peak_memory_bytes for rank in ranks))
                    result.held_bytes.setdefault(name, tuple(rank.held_bytes for rank in ranks))

    def in_turns(self, rounds: int, updates: int) -> None:
        names, work = list(self.result.samples), self.result.work
        for done in range(0, rounds, ROUNDS_TOGETHER):
            count = min(ROUNDS_TOGETHER, rounds - done)
            self._tell(done, count, rounds, f"in turns: {', '.join(names)}")
            ranks = self._run(len(names), take_turns, names, work, WARM_UP_UPDATES, updates, count)
            for turn in range(count):
                for name in names:
                    self.result.samples[name].append(summarise(name, [rank[turn][name] for rank in ranks]))

    def _tell(self, done: int, count: int, rounds: int, what: str) -> None:
        number = f"round {done + 1}" + (f" to {done + count}" if count > 1 else "") + f" of {rounds}, "
        self.progress(f"m = {self.result.work.microbatches}, {number if rounds > 1 else ''}{what}")

    def _run(self, contenders: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        seconds = self.timeout_seconds * contenders
        return self.pool.run(job, *arguments, ranks=self.result.work.stages, timeout=seconds)


def summarise(name: str, ranks: Sequence[RankSample]) -> Sample:
    """All ranks keep one pace in a pipeline (so their mean is taken); in the bound the slowest one counts.

    The first and the last update do not count. A pipeline that keeps many microbatches in flight takes an update or
    more to queue them between its stages. In the last, whose backwards have no forwards between them, stages catch up
    with those behind.
    """
    periods = [(rank.ends[-2] - rank.ends[1]) / (len(rank.ends) - 3) for rank in ranks]
    period = max(periods) if name == BOUND else fmean(periods)
    last = ranks[-1]
    return Sample(
        period_seconds=period,
        fill_seconds=last.ends[0] - min(rank.start for rank in ranks) - period,
        drain_seconds=max(rank.finish for rank in ranks) - last.ends[0] - (len(last.ends) - 1) * period,
        cpu_seconds=tuple(rank.cpu_seconds / len(rank.ends) for rank in ranks),
        in_flight=ranks[0].in_flight,
    )

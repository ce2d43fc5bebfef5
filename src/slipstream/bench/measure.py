"""Interleaved, repeated rounds: every contender is timed once per round, in an order that rotates.

First each contender runs alone, which shows its memory, and whether it runs at all. Those that do are then built side
by side and take turns of a few updates each, `ROUNDS_TOGETHER` rounds before they are built anew: cores that others use
too are fast or slow for a second at a time. On a GPU whose memory they would fill together, every sample is of a
contender alone.

Time per update of a sample is taken in the steady state: from the end of the first group's work to the end of
the last one's, which leaves fill and drain out. They are reported apart, read at the last stage (which
waits first and is done first), and the three add up:

    wall = fill + updates * period + drain

A contender's time is the median of its samples; the least is reported too, as the estimate that a busy
machine disturbs least, and so is the processor time. A schedule of torch's that fails (on a GPU: any contender) is
reported with its error and takes no further part.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import torch

from slipstream.bench.rivals import RIVALS
from slipstream.bench.sample import RankSample, rotated, take_sample, take_turns
from slipstream.bench.work import Work
from slipstream.distributed import RankPool
from slipstream.errors import UserError

BOUND, ENGINE, BASELINE = "bound", "slipstream", "torch_1f1b"
ENGINE_2BW = "slipstream_2bw"  # with all microbatches old: beside it stands what a cutover costs
WARM_UP_UPDATES = 4  # by then our schedule has chosen its depth from the times it measured
ALONE_UPDATES = 3  # where they show memory only
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


@dataclass
class Result:
    """Everything measured at one number of microbatches."""

    work: Work
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    peak_memory_bytes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of each rank, alone
    held_bytes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the same, with nothing in flight
    errors: dict[str, str] = field(default_factory=dict)

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

    def best_synchronous(self) -> str | None:
        times = {name: time for name in RIVALS if (time := self.milliseconds(name)) is not None}
        return min(times, key=times.__getitem__) if times else None


def parse_rivals(text: str) -> list[str]:
    """`all`, `none`, or a list of rivals without their prefix: `1f1b,zbv`."""
    if text in ("all", "none"):
        return list(RIVALS) if text == "all" else []
    names = [f"torch_{part.strip()}" for part in text.split(",")]
    for name in names:
        if name not in RIVALS:
            known = [rival.removeprefix("torch_") for rival in RIVALS]
            near = difflib.get_close_matches(name, RIVALS, n=1)
            hint = f" Did you mean '{near[0].removeprefix('torch_')}'?" if near else ""
            raise UserError(
                f"There is no rival '{name.removeprefix('torch_')}'.{hint} "
                f"Set --rivals to all, none, or a list of {', '.join(known)}."
            )
    return names


def bench(
    pool: RankPool,
    works: Sequence[Work],
    rivals: Sequence[str],
    rounds: int = 15,
    updates: int | None = None,
    *,
    timeout_seconds: float = 120.0,
    progress: Progress = lambda _: None,
) -> Iterator[Result]:
    """Measure each work in turn; `updates` a sample, by default as many as 32 microbatches make (a GPU: 48)."""
    if rounds < 1 or (updates is not None and updates < 2):
        raise UserError(
            f"--rounds {rounds} and --updates {updates}: a median needs 1 round or more, "
            "and a period 2 updates or more."
        )
    for work in works:
        m = work.microbatches
        yield measure(
            pool,
            work,
            [BOUND, *rivals, ENGINE, *([] if work.all_old else [ENGINE_2BW])],
            rounds=rounds,
            updates=updates or (max(5, 48 // m) if work.device == "cuda" else max(4, 32 // m)),
            timeout_seconds=timeout_seconds,
            progress=progress,
        )


def measure(
    pool: RankPool,
    work: Work,
    contenders: Sequence[str],
    *,
    rounds: int,
    updates: int,
    timeout_seconds: float,
    progress: Progress = lambda _: None,
) -> Result:
    """Sample every contender `rounds` times; `updates` updates a sample."""
    result = Result(work)
    pending = list(contenders)
    if work.link_latency_seconds > 0:
        result.errors = {name: NO_LATENCY for name in pending if name in RIVALS}
        pending = [name for name in pending if name not in RIVALS]
    for name in [name for name in pending if name in RIVALS]:
        if reason := RIVALS[name].not_applicable(work.stages, work.microbatches):
            result.errors[name] = f"{NOT_APPLICABLE}: {reason}"
            pending.remove(name)
    take = _Taker(pool, work, timeout_seconds)
    take.warm_up()
    _alone(take, result, pending, 1, ALONE_UPDATES, progress)
    result.samples = {name: [] for name in result.samples}
    if work.device == "cpu" or result.together_bytes < SHARE_TOGETHER * _device_bytes():
        _in_turns(take, result, rounds, updates, progress)
    else:
        _alone(take, result, pending, rounds, updates, progress)
    return result


def _device_bytes() -> int:
    return torch.cuda.get_device_properties(0).total_memory


def _alone(
    take: _Taker, result: Result, names: Sequence[str], rounds: int, updates: int, progress: Progress
) -> None:
    for turn in range(rounds):
        for name in rotated([name for name in names if name not in result.errors], turn):
            progress(f"m = {take.work.microbatches}, {_rounds(turn, 1, rounds)}alone: {name}")
            try:
                ranks = take.alone(name, updates)
            except UserError as error:
                if name not in RIVALS and take.work.device == "cpu":
                    raise
                result.errors[name] = str(error)
                for found in (result.samples, result.peak_memory_bytes, result.held_bytes):
                    found.pop(name, None)
                take.warm_up()  # ranks that hung were replaced by new processes
            else:
                result.samples.setdefault(name, []).append(summarise(name, ranks))
                result.peak_memory_bytes.setdefault(name, tuple(rank.peak_memory_bytes for rank in ranks))
                result.held_bytes.setdefault(name, tuple(rank.held_bytes for rank in ranks))


def _in_turns(take: _Taker, result: Result, rounds: int, updates: int, progress: Progress) -> None:
    names = list(result.samples)
    for turn in range(0, rounds, ROUNDS_TOGETHER):
        count = min(ROUNDS_TOGETHER, rounds - turn)
        progress(f"m = {take.work.microbatches}, {_rounds(turn, count, rounds)}in turns: {', '.join(names)}")
        for taken in take.in_turns(names, updates, count):
            for name, ranks in taken.items():
                result.samples[name].append(summarise(name, ranks))


def _rounds(done: int, count: int, rounds: int) -> str:
    if rounds == 1:
        return ""
    return f"round {done + 1}" + (f" to {done + count}" if count > 1 else "") + f" of {rounds}, "


@dataclass(frozen=True)
class _Taker:
    """Samples of one work on the ranks of a pool."""

    pool: RankPool
    work: Work
    timeout_seconds: float

    def warm_up(self) -> None:
        """A process's first sample pays for lazy loading, in time and in memory: throw one away."""
        work = self.work
        if work.device == "cuda":
            work = replace(work, microbatches=work.stages)
        self._run(1, take_sample, BOUND, work, GPU_WARM_UP_UPDATES, 2)

    def alone(self, name: str, updates: int) -> list[RankSample]:
        on_cpu = self.work.device == "cpu"
        ours = name in (ENGINE, ENGINE_2BW)
        warm_up = WARM_UP_UPDATES if ours or on_cpu else GPU_WARM_UP_UPDATES
        return self._run(1, take_sample, name, self.work, warm_up, updates)

    def in_turns(self, names: Sequence[str], updates: int, rounds: int) -> list[dict[str, list[RankSample]]]:
        """Of each round and contender, its ranks."""
        ranks = self._run(len(names), take_turns, names, self.work, WARM_UP_UPDATES, updates, rounds)
        return [{name: [rank[turn][name] for rank in ranks] for name in names} for turn in range(rounds)]

    def _run(self, contenders: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        seconds = self.timeout_seconds * contenders
        return self.pool.run(job, *arguments, ranks=self.work.stages, timeout=seconds)


def summarise(name: str, ranks: Sequence[RankSample]) -> Sample:
    """All ranks keep one pace in a pipeline (so their mean is taken); in the bound the slowest one counts."""
    periods = [(rank.ends[-1] - rank.ends[0]) / (len(rank.ends) - 1) for rank in ranks]
    period = max(periods) if name == BOUND else fmean(periods)
    last = ranks[-1]
    return Sample(
        period_seconds=period,
        fill_seconds=last.ends[0] - min(rank.start for rank in ranks) - period,
        drain_seconds=max(rank.finish for rank in ranks) - last.ends[-1],
        cpu_seconds=tuple(rank.cpu_seconds / len(rank.ends) for rank in ranks),
    )

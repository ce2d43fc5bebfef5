"""Interleaved, repeated rounds: every contender takes one sample per round, in an order that rotates.

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

from slipstream.bench.rivals import RIVALS
from slipstream.bench.sample import RankSample, take_sample
from slipstream.bench.work import Work
from slipstream.distributed import RankPool
from slipstream.errors import UserError

BOUND, ENGINE, BASELINE = "bound", "slipstream", "torch_1f1b"
WARM_UP_UPDATES = 4  # by then our schedule has chosen its depth from the times it measured
GPU_WARM_UP_UPDATES = 2  # of the others, on a GPU: its time is dear, and the processes are warm
NO_LATENCY = "not run: torch's schedules have no injected link latency"


@dataclass(frozen=True)
class Sample:
    """One contender, one round, all ranks together."""

    period_seconds: float
    fill_seconds: float
    drain_seconds: float
    cpu_seconds: tuple[float, ...]  # per update, of each rank
    peak_memory_bytes: tuple[int, ...]


@dataclass
class Result:
    """Everything measured at one number of microbatches."""

    work: Work
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

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
    rounds: int = 5,
    updates: int | None = None,
    *,
    timeout_seconds: float = 120.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Result]:
    """Measure each work in turn; `updates` a sample, by default as many as 64 microbatches make (a GPU: 48)."""
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
            [BOUND, *rivals, ENGINE],
            rounds=rounds,
            updates=updates or (max(5, 48 // m) if work.device == "cuda" else max(8, 64 // m)),
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
    progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """Sample every contender once per round; `updates` updates a sample."""
    result = Result(work)
    pending = list(contenders)
    if work.link_latency_seconds > 0:
        result.errors = {name: NO_LATENCY for name in pending if name in RIVALS}
        pending = [name for name in pending if name not in RIVALS]
    _warm_up(pool, work, timeout_seconds)
    for turn in range(rounds):
        order = [name for name in pending if name not in result.errors]
        shift = turn % max(1, len(order))
        for name in order[shift:] + order[:shift]:
            progress(f"m = {work.microbatches}, round {turn + 1} of {rounds}: {name}")
            try:
                sample = _take(pool, name, work, updates, timeout_seconds)
            except UserError as error:
                if name not in RIVALS and work.device == "cpu":
                    raise
                result.errors[name] = str(error)
                result.samples.pop(name, None)
                _warm_up(pool, work, timeout_seconds)  # ranks that hung were replaced by new processes
            else:
                result.samples.setdefault(name, []).append(sample)
    return result


def _warm_up(pool: RankPool, work: Work, timeout_seconds: float) -> None:
    """A process's first sample pays for lazy loading, in time and in memory: throw one away."""
    if work.device == "cuda":
        work = replace(work, microbatches=work.stages)
    _take(pool, BOUND, work, 2, timeout_seconds)


def _take(pool: RankPool, name: str, work: Work, updates: int, timeout_seconds: float) -> Sample:
    warm_up = WARM_UP_UPDATES if name == ENGINE or work.device == "cpu" else GPU_WARM_UP_UPDATES
    ranks: list[RankSample] = pool.run(
        take_sample, name, work, warm_up, updates, ranks=work.stages, timeout=timeout_seconds
    )
    return summarise(name, ranks)


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
        peak_memory_bytes=tuple(rank.peak_memory_bytes for rank in ranks),
    )

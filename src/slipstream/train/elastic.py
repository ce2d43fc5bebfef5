"""Ranks that are lost and come back: the run goes on from its newest state, with the stages that are left.

The trajectory does not depend on the number of stages, so nothing has to be waited for. Invariant: places change
between starts only; what is made of a start is decided by its leader, from what the run folder holds (`folder.plan`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from slipstream.config import Config, resolve
from slipstream.distributed import RankPool
from slipstream.distributed.launch import Stop
from slipstream.errors import ConfigError, LostRankError, UserError
from slipstream.train.claim import memory_of

JOB = "slipstream.train.session:run_rank"
COMING_UP_SECONDS = 120.0  # to import torch and touch a device


def feasible(config: Config, most: int) -> list[int]:
    """The numbers of stages from pipeline.least_stages to `most` that this run can be cut into."""
    found = []
    for stages in range(config.pipeline.least_stages, most + 1):
        with suppress(ConfigError):
            resolve(config.changed(pipeline={"stages": stages}))
            found.append(stages)
    return found


def fitted(config: Config, ranks: int) -> Config:
    """An elastic run with as many stages as `ranks` can hold; any other run as it is."""
    if not config.pipeline.elastic:
        return config
    most = min(config.stages, ranks // config.pipeline.data_ranks)
    found = feasible(config, most)
    if not found:
        raise UserError(
            f"{ranks} ranks are left, and with pipeline.data_ranks = {config.pipeline.data_ranks} and "
            f"pipeline.least_stages = {config.pipeline.least_stages} they cannot form a pipeline. Start more, or lower "
            "pipeline.least_stages."
        )
    return config.changed(pipeline={"stages": found[-1]})


class Places:
    """Where ranks can run, and which of these are out."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._out: set[int] = set()
        self._suspect: set[int] = set()  # lost since the newest checkpoint

    @property
    def up(self) -> list[int]:
        return [place for place in range(self._count) if place not in self._out]

    @property
    def out(self) -> list[int]:
        return sorted(self._out)

    def progressed(self) -> None:
        self._suspect.clear()

    def lost(self, places: Sequence[int], comes_up: Callable[[int], bool]) -> None:
        """A place is out if no process comes up there, or if it was lost before without a checkpoint in between."""
        for place in places:
            if place in self._suspect or not comes_up(place):
                self._out.add(place)
            self._suspect.add(place)

    def back(self, place: int) -> None:
        self._out.discard(place)
        self._suspect.discard(place)


def supervise(pool: RankPool, stop: Stop, config: Config, command: str, say: Callable[[str], None]) -> str:
    """Run until it is finished, stopped by a person, or lost too often; how it ended."""
    places, left = Places(pool.size), config.train.restarts
    assert left is not None
    newest = newest_step(config)
    while True:
        now = fitted(config, len(places.up))
        used = places.up[: now.ranks]
        try:
            with _growing(pool, places, config, used, say) as grows:
                reason = _run(pool, stop, config, command, used)
            if reason == "signal" and grows.is_set() and not stop.asked.is_set():
                continue
            return reason
        except LostRankError as error:
            if stop.asked.is_set() or not config.train.restarts:
                raise
            step = newest_step(config)
            if step != newest:
                newest, left = step, config.train.restarts
                places.progressed()
            if left == 0:
                raise UserError(
                    f"{error}\nGiven up: {config.train.restarts} restarts from {_state(step)} did not get to a newer "
                    "checkpoint (train.restarts)."
                ) from error
            left -= 1
            say(f"{error}")
            if config.pipeline.elastic:
                places.lost(
                    [used[rank] for rank in error.ranks],
                    lambda place: pool.comes_up(place, COMING_UP_SECONDS),
                )
            say(_goes_on(config, places, step))


def _run(pool: RankPool, stop: Stop, config: Config, command: str, used: Sequence[int]) -> str:
    patience = config.train.timeout_seconds
    answers = stop.guard(
        lambda: pool.run(JOB, config.model_dump(), command, places=used, patience_seconds=patience)
    )
    return answers[0]["reason"]


def _goes_on(config: Config, places: Places, step: int | None) -> str:
    stages = fitted(config, len(places.up)).pipeline.stages
    out = f" Out: place {', '.join(map(str, places.out))}." if places.out else ""
    return f"Starting again from {_state(step)} with {stages} stage{'s' * (stages != 1)}.{out}"


def _state(step: int | None) -> str:
    return "the beginning" if step is None else f"step {step}"


@contextmanager
def _growing(
    pool: RankPool, places: Places, config: Config, used: Sequence[int], say: Callable[[str], None]
) -> Iterator[threading.Event]:
    """Inside, places that are out are tried every now and then. When the run can have more stages it is asked to stop;
    the event says that this was why."""
    asked, over = threading.Event(), threading.Event()

    def look() -> None:
        while places.out and not over.wait(config.pipeline.return_seconds):
            for place in places.out:
                if pool.comes_up(place, COMING_UP_SECONDS) and not over.is_set():
                    places.back(place)
            wider = fitted(config, len(places.up))
            if wider.ranks > len(used) and not over.is_set():
                say(f"Place back: the run saves and goes on with {wider.pipeline.stages} stages.")
                asked.set()
                pool.ask_to_stop()
                return

    thread = threading.Thread(target=look, name="slipstream-growing", daemon=True)
    if places.out:
        thread.start()
    try:
        yield asked
    finally:
        over.set()
        if thread.is_alive():
            thread.join()  # it may be starting a process


def newest_step(config: Config) -> int | None:
    folder = Path(config.run.dir)
    steps = [*(folder / "checkpoints").glob("step-*"), *memory_of(folder).glob("step-*")]
    return max((int(path.name[5:]) for path in steps if path.name[5:].isdigit()), default=None)

"""A few groups as they were: our own timeline as one event, with the costs a simulator needs to predict it, and a
trace by torch's profiler, with a picture of where an update's time went (`metrics/breakdown.py`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from slipstream.config import Config
from slipstream.config.settings import updates
from slipstream.metrics.breakdown import Sizes, breakdown
from slipstream.metrics.record import Recorder
from slipstream.models.sizes import ModelConfig
from slipstream.pipeline.depth import MOST_GROUPS_TO_SETTLE
from slipstream.pipeline.depth_trial import GROUPS_OF_A_TRIAL
from slipstream.schedule.actions import Action, Kind
from slipstream.schedule.costs import measured_costs
from slipstream.schedule.timeline import Span
from slipstream.train import fine
from slipstream.train.board import Board
from slipstream.train.build import Model
from slipstream.train.engine import RunEngine
from slipstream.train.reporter import Position

GROUPS = 3  # recorded from the chosen step on
LATER = 2  # groups until they are read: a GPU has done them by then, and nobody waits for it
_MLP = re.compile("mlp|ffn|feed_?forward|expert", re.IGNORECASE)


def recorded_from(config: Config, on_gpu: bool) -> int:
    """train.timeline_at, or the next step whose groups are typical: not in a flushed or fine start, no validation
    shortly before them or in between, which drains the pipeline, no stage that is still being recorded, and no depth
    that is still tried. 0: never."""
    train = config.train
    if not train.timeline_at:
        return 0
    start = max(updates(config.optim.sync_start, train.steps), fine.length(config))
    recording = MOST_GROUPS_TO_SETTLE if train.cuda_graphs else 0
    pipeline = config.pipeline
    tries = on_gpu and pipeline.schedule == "2bw" and pipeline.in_flight is None and config.stages > 1
    waits = (
        recording + (GROUPS_OF_A_TRIAL if tries else 0),
        recording,
        0,
    )  # better a short one than no timeline
    unsettled = next(wait for wait in waits if not wait or start + wait + 2 * GROUPS <= train.steps)
    least = max(train.timeline_at, start + unsettled + (GROUPS if start or unsettled else 0))
    if not train.eval_every:
        return least
    steps = range(least, least + train.eval_every)
    return next(
        (step for step in steps if GROUPS <= step % train.eval_every <= train.eval_every - GROUPS), least
    )


class Tracing:
    """Switches the trace on and off on each rank; the leader collects and writes."""

    def __init__(
        self, engine: RunEngine, board: Board, recorder: Recorder | None, position: Position, at: int
    ) -> None:
        self._engine, self._board, self._recorder = engine, board, recorder
        self._rank, self._stages, self._at = position.rank, position.stages, at
        self._collecting = False

    def before(self, step: int) -> None:
        """Called with the number of groups submitted, before the next one is."""
        if self._at and step == self._at:
            self._engine.trace(True)
        elif self._at and step == self._at + GROUPS:
            self._engine.trace(False)
        elif self._at and step == self._at + GROUPS + LATER:
            self._post()
        self._collect()

    def finish(self) -> None:
        """After the last drain: what is still being recorded or collected."""
        self._engine.trace(False)
        self._post()
        self._collect(wait=True)

    def _post(self) -> None:
        spans = self._engine.take_trace()
        if spans and self._rank < self._stages:
            self._board.post(
                f"timeline/{self._rank}", [[span.rank, *span.action, *span[2:]] for span in spans]
            )
            self._collecting = True

    def _collect(self, *, wait: bool = False) -> None:
        if self._recorder is None or not self._collecting:
            return
        keys = [f"timeline/{rank}" for rank in range(self._stages)]
        found = self._board.wait(*keys) if wait else self._board.read(*keys)
        if found is not None:
            self._collecting = False
            rows = [row for part in found for row in part]
            spans = [Span(row[0], Action(Kind(row[1]), *row[2:6]), *row[6:]) for row in rows]
            self._recorder.write("timeline", self._at, spans=rows, predicted=measured_costs(spans))


def sizes_of(model: Model, config: Config) -> Sizes:
    """Of a model that is not ours, the MLP's widths are those that matrices of that name have and no others."""
    pipeline = config.pipeline
    tokens = pipeline.microbatch_size // pipeline.data_ranks * config.data.sequence
    if isinstance(model, ModelConfig):
        return Sizes.of(model, tokens)
    sides: tuple[set[int], set[int]] = (set(), set())
    for name, parameter in nn.ModuleList(model.layers).named_parameters():
        sides[bool(_MLP.search(name))].update(parameter.shape)
    return Sizes(model.vocab, frozenset(sides[1] - sides[0]), tokens)


_KEPT: list[profile] = []  # torch 2.13 may crash where the collector frees what a profiler has recorded


def recorder() -> profile:
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    _KEPT.append(profile(activities=kinds, record_shapes=True))
    return _KEPT[-1]


def written(recorded: profile, path: Path) -> dict[str, Any]:
    """What was recorded, in a file, and as it stands there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(path))
    return json.loads(path.read_text(errors="replace"))


class Profiling:
    """A trace by torch's own profiler (train.profile), one file per rank, for ui.perfetto.dev or chrome://tracing, and
    its picture: switched on before the update after step `at`, and off three updates later. 0: never."""

    def __init__(self, folder: Path, rank: int, at: int, sizes: Sizes) -> None:
        self._path, self._at, self._sizes = folder / "profile" / f"rank-{rank}.json", at, sizes
        self._running: profile | None = None
        self._updates = 0

    def before(self, step: int) -> None:
        """Called with the number of groups submitted, before the next one is."""
        if self._at and step == self._at:
            self._running = recorder()
            self._running.start()
        elif self._running is not None and step >= self._at + GROUPS:
            self.finish()
        self._updates = step + 1 - self._at

    def finish(self) -> None:
        """Write what was recorded, if anything is being recorded."""
        if self._running is None:
            return
        self._running.stop()
        trace = written(self._running, self._path)
        found = breakdown(trace, self._sizes).per_update(min(self._updates, GROUPS))
        self._path.with_suffix(".txt").write_text("\n".join(found.lines()) + "\n")
        self._running = None

"""Run folders as the trainer writes them, of any length and in any state."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.schedule.generate import build
from slipstream.schedule.simulate import Costs, simulate

STAGES, MICROBATCHES = 3, 4
COSTS = {"forward": [0.01] * STAGES, "backward": [0.02] * STAGES, "update": [0.003] * STAGES}


def step_event(step: int, rng: random.Random, stages: int = STAGES, **changes: Any) -> dict[str, Any]:
    event = {
        "event": "step", "time": 1e9 + step, "step": step, "lr": 1e-3,
        "loss": 4 + 5 * math.exp(-step / 50) + rng.gauss(0, 0.05),
        "grad_norm": math.exp(rng.gauss(0, 0.2)), "skipped": False, "tokens": 1000 * step,
        "tokens_per_second": 1000.0, "busy": [0.9] * stages, "mfu": 0.4, "memory_bytes": [2**28] * stages,
        "seconds": float(step),
    }  # fmt: skip
    return {**event, **changes}


def timeline_event(step: int, groups: int = 3) -> dict[str, Any]:
    """What a run would have measured had it followed the simulator exactly, from group `step` on."""
    timeline = simulate(
        build("2bw", stages=STAGES, microbatches=MICROBATCHES, groups=groups + 4), Costs(**COSTS)
    )
    rows = [
        [span.rank, span.action.kind.value, span.action.stage, span.action.microbatch,
         span.action.group + step - 3, (span.action.version or 0) + step - 3,
         span.start + 7.0, span.end + 7.0]
        for span in timeline.spans
        if 3 <= span.action.group < 3 + groups
    ]  # fmt: skip
    return {"event": "timeline", "time": 1e9, "step": step, "spans": rows, "predicted": COSTS}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def write(
        name: str = "run", steps: int = 200, extra: list[dict[str, Any]] | None = None, finish: bool = True,
        stages: int = STAGES, config: str = "[train]\nsteps = 200\n",
        environment: dict[str, Any] | None = None,
    ) -> Path:  # fmt: skip
        rng = random.Random(0)
        folder = tmp_path / name
        folder.mkdir(parents=True)
        events: list[dict[str, Any]] = [
            {"event": "start", "time": 1e9, "step": 0, "stages": stages, "data_ranks": 1, "schedule": "2bw",
             "microbatches": MICROBATCHES, "parameters": 1_000_000, "resumed": False}
        ]  # fmt: skip
        for step in range(1, steps + 1):
            events.append(step_event(step, rng, stages))
            if step % max(1, steps // 10) == 0:
                events.append(
                    {"event": "validation", "time": 1e9 + step, "step": step, "loss": 4.0, "tokens": step}
                )
        if stages == STAGES and steps:
            events.append(timeline_event(steps // 2))
        events += extra or []
        if finish:
            events.append(
                {
                    "event": "finish",
                    "time": 2e9,
                    "step": steps,
                    "validation_loss": 4.0,
                    "tokens": 9,
                    "seconds": 9.0,
                }
            )
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        (folder / "config.toml").write_text(config)
        (folder / "environment.json").write_text(
            json.dumps(environment or {"torch": "2.13", "data": {"hash": "ab"}})
        )
        return folder

    return write

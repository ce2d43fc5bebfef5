"""`slipstream train`, but it does not end before its pipeline has changed, however fast the machine is.

    python -m tests.train.held FOLDER SETTINGS

A start with fewer stages than were asked for holds before step 150 until it is asked to stop, as torchrun does when a
node comes. A start with all of them holds before step 190 until there is a file `lost` in FOLDER: a node was taken.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from slipstream import cli
from slipstream.train import session, trainer

LONGEST_SECONDS = 250.0  # then something is wrong, and the test tells what
FEWER_UNTIL, ALL_UNTIL = 150, 190


def hold(lost: Path) -> None:
    usual_train, usual_submit = session.train, trainer.submit
    asked: Any = None

    def train(parts: Any, start: int, offset: int, stop: Any, **options: Any) -> Any:
        nonlocal asked
        asked = stop
        return usual_train(parts, start, offset, stop, **options)

    def submit(parts: Any, step: int, batch: Any) -> None:
        deadline = time.monotonic() + LONGEST_SECONDS
        fewer = parts.config.pipeline.stages < 2
        while step >= (FEWER_UNTIL if fewer else ALL_UNTIL) and not asked.is_set():
            if not fewer and lost.exists():
                break
            assert time.monotonic() < deadline, f"held at step {step}: nothing happened"
            time.sleep(0.05)
        usual_submit(parts, step, batch)

    session.train, trainer.submit = train, submit


if __name__ == "__main__":
    hold(Path(sys.argv[1]) / "lost")
    sys.argv = ["slipstream", "train", *sys.argv[2:]]
    cli.main()

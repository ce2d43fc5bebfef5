"""What is printed while a run trains: fits the terminal, spares a log file, and outlives its reader."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
from rich.console import Console

from slipstream.metrics import progress
from slipstream.metrics.progress import Show, short_line, step_line

EVENT = {
    "step": 123, "loss": 3.98217, "lr": 0.00997, "grad_norm": 1.4182, "skipped": False, "tokens_per_second": 12345.6,
    "busy": [0.97, 0.95], "mfu": None, "memory_bytes": [4e8, 5e8],
}  # fmt: skip


@pytest.mark.parametrize("width", [50, 80, 100, 160])
def test_a_terminal_keeps_step_total_bar_loss_and_time_left(width):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    with Show(400, console=console) as show:
        show.step(EVENT, 93.0)
        show._bar.refresh()
        drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    shown = [line for line in re.split(r"[\r\n]", drawn) if "123/400" in line][-1]
    assert len(shown) <= width
    assert "123/400" in shown
    assert "loss 3.9822" in shown
    assert "eta 1:33" in shown
    assert "━" in shown or "╸" in shown
    assert "…" not in shown
    assert ("12,346 tok/s" in shown) == (width >= 80)


def test_a_wide_line_has_everything():
    assert short_line(EVENT, 93.0, 200) == (
        "loss 3.9822  eta 1:33  12,346 tok/s  norm 1.418  busy 97%/95%  lr 0.00997  mem 0.47 GiB"
    )
    assert step_line(EVENT).startswith("loss 3.9822  lr 0.00997  norm 1.418")


def lines(every: int | None, steps: int, seconds: float, monkeypatch) -> list[int]:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    with Show(steps, every, Console(file=out, width=80)) as show:
        for step in range(1, steps + 1):
            show.step(EVENT | {"step": step}, 1.0)
            clock[0] += seconds
    return [int(line.split("/")[0].removeprefix("step ")) for line in out.getvalue().splitlines()]


def test_elsewhere_a_line_every_few_seconds(monkeypatch):
    assert lines(None, 400, 0.5, monkeypatch) == [*range(1, 400, 10), 400]
    assert lines(None, 3, 60.0, monkeypatch) == [1, 2, 3]
    assert lines(100, 400, 0.5, monkeypatch) == [100, 200, 300, 400]


def test_quiet_prints_only_what_is_marked():
    out = io.StringIO()
    with Show(4, None, Console(file=out, width=80), quiet=True) as show:
        show.step(EVENT, 1.0)
        show.note("something")
        show.note("a warning", "yellow")
    assert out.getvalue() == "a warning\n"


def test_a_closed_pipe_is_no_error():
    code = (
        "from slipstream.metrics.progress import Show\n"
        "with Show(9) as show:\n"
        "    for number in range(20000): show.note(f'line {number}')\n"
        "print('the end', file=__import__('sys').stderr)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "line 0\n"
    process.stdout.close()
    assert process.wait() == 0
    assert process.stderr.read() == "the end\n"

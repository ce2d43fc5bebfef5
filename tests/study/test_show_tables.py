"""A study's tables in a terminal: no figure is cut, however narrow it is."""

from __future__ import annotations

import pytest
from rich.console import Console

from slipstream.cli import study
from slipstream.metrics.report_page import Table

WIDE = Table(
    ["optimizer", "mode", *(f"P={p} m={2 * p}" for p in range(8))],
    [["muon", f"mode {row}", *(f"1.{row}{p}4 [1.000, 1.{row}{p}9]" for p in range(8))] for row in range(3)],
    title="Net gain",
    note="A note.",
)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_figure_is_shown_whole_beside_the_names_of_its_row(width, monkeypatch, capsys):
    console = Console(width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(study, "Console", lambda **_: console)
    study._print([WIDE])
    shown = capsys.readouterr().out
    assert all(len(line) <= width for line in shown.splitlines())
    assert "…" not in shown
    for row in WIDE.rows:
        for cell in row[2:]:
            figure, _, interval = cell.partition(" ")
            assert figure in shown
            assert interval in shown
    parts = len(study.blocks(WIDE, width))
    assert shown.count("mode 2") == parts
    assert (parts == 1) == (width == 200)


def test_into_a_pipe_it_is_markdown(capsys):
    study._print([WIDE])
    assert "| muon | mode 0 | 1.004 [1.000, 1.009] |" in capsys.readouterr().out

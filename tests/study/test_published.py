"""The tables in docs/results are those that the code makes of the runs beside them."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.study.results import read_export

ROOT = Path(__file__).parents[2]
EXPORTS = sorted((ROOT / "docs" / "results").glob("*.jsonl.gz"))


@pytest.mark.parametrize("export", EXPORTS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_the_published_tables_are_made_of_the_published_runs(export, tmp_path, capsys):
    name = export.name.removesuffix(".jsonl.gz")
    places = {result.key("data.path") for result in read_export(export)} - {None, ""}
    where = [f"data.path={place}" for place in places]
    study = ROOT / "studies" / f"{name}.toml"
    with pytest.raises(SystemExit) as ended:
        main(["study", "table", str(study), *where, "--results", str(export), "--out", str(tmp_path)])
    assert ended.value.code == 0, capsys.readouterr().err
    for file in (f"{name}.md", f"{name}.csv", f"{name}-runs.csv"):
        assert (tmp_path / file).read_text() == (export.parent / file).read_text(), f"{file} is stale"


NUMBERS = {"two": 2, "three": 3, "five": 5}


@pytest.mark.parametrize("export", EXPORTS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_a_page_has_the_seeds_it_speaks_of(export):
    """Of `three paired seeds` in its words: every row has three. Nothing of fewer than three has an interval."""
    name = export.name.removesuffix(".jsonl.gz")
    about = re.sub(r"\s+", " ", (export.parent / f"{name}.md").read_text().partition("## ")[0])
    with (export.parent / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    seeds = {int(row["seeds"]) for row in rows}
    for word in re.findall(r"(\w+) paired seeds", about):
        assert seeds == {NUMBERS[word]}, f"{name} says {word} paired seeds"
    for row in rows:
        if int(row["seeds"]) < 3:
            assert not any(value for key, value in row.items() if key.endswith(("_low", "_high"))), row


def test_every_published_study_is_there():
    assert EXPORTS
    pages = {path.stem for path in (ROOT / "docs" / "results").glob("*.html")} - {
        "one-gpu-race",
        "one-gpu-race-700",
    }
    assert pages == {path.name.removesuffix(".jsonl.gz") for path in EXPORTS}

"""`slipstream bench` from the outside: the JSON others read, and mistakes that are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main

PROMISED = {
    "microbatches": int,
    "carrier": str,
    "bound_ms": float,
    "torch_1f1b_ms": float,
    "torch_gpipe_ms": float,
    "slipstream_ms": float,
    "speedup_over_1f1b": float,
    "best_sync": str,
    "best_sync_ms": float,
    "speedup_over_best_sync": float,
    "fraction_of_bound": float,
    "peak_memory_bytes": dict,
}


def run(arguments: str) -> None:
    """Commands end by raising SystemExit, with 0 when all is well."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments.split()])
    assert ended.value.code == 0


def test_json_has_the_promised_fields(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "new" / "timeline.svg"
    rivals = "1f1b,gpipe,dualpipev"  # that the others run is shown in test_rivals.py and test_scheduler.py
    options = f"--rivals {rivals} --rounds 1 --updates 4 --clip --json --plot {picture}"
    run(f"--work sleep --microbatches 2,4 {options}")
    rows = json.loads(capsys.readouterr().out)
    assert [row["microbatches"] for row in rows] == [2, 4]
    for row in rows:
        assert {name: type(row[name]) for name in PROMISED} == PROMISED
        assert row["speedup_over_1f1b"] == pytest.approx(row["torch_1f1b_ms"] / row["slipstream_ms"])
        assert row["fraction_of_bound"] == pytest.approx(row["bound_ms"] / row["slipstream_ms"])
        assert row[f"{row['best_sync']}_ms"] == row["best_sync_ms"] <= row["torch_1f1b_ms"]
        assert {"bound", "slipstream", "torch_1f1b", "torch_gpipe"} <= row["peak_memory_bytes"].keys()
        assert row["torch_zbv_ms"] is None  # not asked for
        assert (row["correction"], row["cutover"]) == ("none", min(3, row["microbatches"]))
        depths = row["in_flight"]
        assert all(2 <= depth <= row["microbatches"] + 1 for depth in depths.values())
        assert set(depths) == (
            {"slipstream"} if row["microbatches"] == 2 else {"slipstream", "slipstream_2bw"}
        )
        assert all(len(ranks) == 2 for ranks in row["peak_memory_bytes"].values())
    expected = "not applicable: it needs 4 microbatches or more at 2 stages"
    assert rows[0]["errors"]["torch_dualpipev"] == expected  # at m = 2; at m = 4 it runs
    assert rows[1]["torch_dualpipev_ms"] > 0
    drawn = picture.read_text()
    for label in ("slipstream", "torch 1F1B", "torch GPipe"):
        assert f"{label}, predicted" in drawn
        assert f"{label}, measured" in drawn
    assert "torch DualPipeV" not in drawn  # it failed


def test_a_microbatch_has_as_many_rows_as_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    run("--microbatches 2 --rivals none --rounds 1 --updates 4 --rows 3 --sequence 5 --json")
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["rows"], row["sequence"]) == (3, 5)


def test_the_table_names_every_contender(capsys: pytest.CaptureFixture[str]) -> None:
    run("--work sleep --microbatches 2 --rounds 1 --updates 4 --rivals 1f1b,dualpipev")
    shown = capsys.readouterr().out
    for words in (
        "bubble-free bound",
        "torch 1F1B",
        "not applicable",
        "slipstream",
        "slipstream: 2 of 2 old,",
        "fill",
        "drain",
        "it needs 4 microbatches or more",
        "of bound: time per update without any waiting",
    ):
        assert words in " ".join(shown.split())
    assert "failed" not in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--microbatches many", "such as 2,4,8"),
        ("--stages 4 --microbatches 2", "--microbatches to 4 or more"),
        ("--rivals zero", "Set --rivals to"),
        ("--updates 3", "4 or more"),
        ("--rounds 0", "1 round or more"),
        ("--work sleep --model llama-8m", "--model llama-8m is read by the language work only"),
        ("--plot picture.bmp", ".html"),
        ("--stages 0", "--stages to 2 or more"),
        ("--in-flight 9", "set in_flight from 2"),
        ("--correction fedback", "Did you mean"),
        ("--link-latency-ms -1", "must not be negative"),
    ],
)
def test_mistakes_end_with_2_and_say_what_to_change(
    capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments.split()])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err

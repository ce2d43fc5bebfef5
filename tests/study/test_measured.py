"""A study that tunes on shorter runs, from results to its tables and to the planner's table: known numbers in, out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.plan.penalty import Penalty, find_penalty, load_penalties, write_penalties
from slipstream.study.measured import entries
from slipstream.study.parse import load_study
from slipstream.study.results import Result, write_export
from slipstream.study.sweep import TUNING, settings
from slipstream.study.tables import compared_cells, tables

FILE = Path(__file__).parents[2] / "studies" / "b-muon-adamw.toml"
SLOPE = {"muon": 0.25, "adamw": 0.4}  # loss per e-fold of tokens, within a run and by length
GAPS = {"sync": 0.0, "delay": 0.06, "ef": 0.03, "ef+start": 0.012}
JITTER = (0.0, 0.002, -0.002, 0.001, -0.001)  # of the gap, by seed


@pytest.fixture(scope="module")
def b_study():
    """Every run of setting B, whole ones with a known gap to synchronous, as if it had been run."""
    study = load_study(FILE)
    results: dict[str, Result] = {}
    while True:
        expansion = study.expand({name: result.loss for name, result in results.items()})
        todo = [point for point in expansion.points if point.digest not in results]
        if not todo:
            return study, expansion, results
        for point in todo:
            labels, config = point.labels, point.config
            optimizer, mode, seed = labels["optimizer"], labels["mode"], int(labels["seed"])
            tokens = float(config.train.steps * config.tokens_per_step)
            slope, base = SLOPE[optimizer], {"muon": 3.0, "adamw": 3.2}[optimizer]
            gap = GAPS[mode] + (JITTER[seed] if mode != "sync" else 0.0)
            if TUNING in labels:  # a quarter of the tokens; the middle of each grid is best
                gap += 0.0 if labels["lr"] in ("0.004", "0.002", "0.001") else 0.1
                base += slope * math.log(4)
            loss = base + 0.05 * seed + gap
            curve = [(tokens * i / 34, loss + slope * math.log(34 / i)) for i in range(1, 35)]
            results[point.digest] = Result(
                point.digest, point.folder, settings(config), loss=loss, steps=config.train.steps,
                tokens=tokens, seconds=40.0, parameters=8_129_792, validation=curve, training=curve,
            )  # fmt: skip


def rows_of(table) -> dict[tuple[str, str], dict[str, str]]:
    return {(row[0], row[1]): dict(zip(table.header, row, strict=True)) for row in table.rows}


def test_every_table_of_the_long_study(b_study):
    found = {table.title: table for table in tables(*b_study)}
    assert list(found) == ["Loss", "Net gain (simulated)", "By lr"]
    loss = rows_of(found["Loss"])
    assert len(loss) == 8  # the shorter runs are not among them
    delay = loss["muon", "delay"]
    assert delay["seeds"] == "5"
    assert loss["muon", "sync"]["validation loss"] == "3.1000 ± 0.0354"  # 0.05 sqrt(2.5) / sqrt(5)
    half = 2.776445 * math.sqrt(2.5e-6) / math.sqrt(5)  # t(0.975, 4) s / sqrt(n)
    assert delay["gap to sync"] == f"+0.0600 [{0.06 - half:+.4f}, {0.06 + half:+.4f}]"
    assert loss["muon", "ef"]["share of delay's gap recovered"].startswith("50 % [")
    assert loss["muon", "ef+start"]["share of delay's gap recovered"].startswith("80 % [")
    low, high = math.exp((0.06 - half) / 0.25), math.exp((0.06 + half) / 0.25)
    assert delay["token penalty by curve"] == f"{math.exp(0.06 / 0.25):.3f} [{low:.3f}, {high:.3f}]"
    assert loss["adamw", "delay"]["token penalty by curve"].startswith(f"{math.exp(0.06 / 0.4):.3f} [")


def test_net_gains_are_speed_over_penalty_for_nine_pipelines(b_study):
    (gains,) = (table for table in tables(*b_study) if "simulated" in table.title)
    assert [name for name in gains.header if name.startswith("P=")] == [
        f"P={p} m={p * k}" for p in (8, 16, 32) for k in (1, 2, 3)
    ]
    assert [row[2] for row in gains.rows[2:]] == ["by curve", "by length"] * 6
    rows = rows_of(replace(gains, rows=[row for row in gains.rows if row[2] != "by length"]))
    speed = float(rows["", "speed-up of 2BW over it"]["P=32 m=96"])
    assert speed == pytest.approx(1 + 31 / (6 * 96), abs=2e-3)  # against ZB-V: bubble (P-1)/(6m+P-1)
    value, low, high = (
        rows["muon", "ef"]["P=32 m=96"].replace("[", "").replace("]", "").replace(",", "").split()
    )
    assert float(value) == pytest.approx(speed / math.exp(0.03 / 0.25), abs=2e-3)
    assert float(low) < float(value) < float(high)


def test_by_length_a_gap_is_worth_at_least_what_shorter_runs_say(b_study):
    (table,) = (table for table in tables(*b_study) if table.title == "Loss")
    rows = rows_of(table)
    assert rows["muon", "ef"]["token penalty by length"] == f"≥ {math.exp(0.03 / 0.25):.3f}"
    assert rows["muon", "sync"]["token penalty by length"] == "–"
    assert "to the whole one: muon 0.2500, adamw 0.4000." in table.note


def test_the_grid_stands_by_itself(b_study):
    (table,) = (table for table in tables(*b_study) if table.title == "By lr")
    assert len(table.rows) == 4
    assert all("train.steps=1241" in " ".join(row) for row in table.rows)


def test_the_planner_gets_an_entry_for_each_row_with_its_source(b_study):
    study, *_ = b_study
    measured = entries(study.name, *compared_cells(*b_study))
    found = {(entry.optimizer, entry.correction): entry for entry in measured}
    names = ("none", "error_feedback", "error_feedback+sync_start")
    assert set(found) == {(optimizer, name) for optimizer in ("muon", "adamw") for name in names}
    entry = found["muon", "error_feedback"]
    assert entry.penalty == pytest.approx(math.exp(0.03 / 0.25), abs=1e-4)
    assert (entry.batch_tokens, entry.parameters, entry.gap) == (32768, 8_129_792, 0.03)
    assert entry.source.startswith("study b-muon-adamw: 5 paired seeds, 95 % interval [1.1")
    assert "20.0 tokens per parameter" in entry.source
    assert entry.source.count(", ") >= 4  # the digest of every run
    assert "(by length at least 1.127)" in entry.source
    assert "synchronous start of 10 %" in found["muon", "error_feedback+sync_start"].source


def test_a_start_of_another_length_is_not_the_planners(b_study):
    study, expansion, results = b_study
    longer = {
        name: Result(**(vars(result) | {"settings": result.settings | {"optim.sync_start": 0.2}}))
        for name, result in results.items()
        if result.settings.get("optim.sync_start")
    }
    measured = entries(study.name, *compared_cells(study, expansion, results | longer))
    assert {entry.correction for entry in measured} == {"none", "error_feedback"}


@pytest.mark.parametrize(
    ("share", "parts", "also", "name"),
    [
        (0.2, 4, {}, "error_feedback+fine_start"),
        (0.1, 4, {}, None),
        (0.2, 2, {}, None),
        (0.2, 4, {"optim.sync_start": 0.1}, None),
        (0.2, 4, {"optim.correction": "none"}, None),
    ],
)
def test_a_fine_start_is_the_planners_as_it_was_measured_alone(b_study, share, parts, also, name):
    """Of a fifth of the updates and in quarters, with error feedback."""
    study, expansion, results = b_study
    fine = {
        key: Result(
            **(
                vars(result)
                | {
                    "settings": result.settings
                    | {
                        "pipeline.fine_start": share,
                        "pipeline.fine_microbatches": parts * result.settings["pipeline.microbatches"],
                    }
                    | also
                }
            )
        )
        for key, result in results.items()
        if result.settings["optim.correction"] == "error_feedback"
        and not result.settings.get("optim.sync_start")
    }
    measured = entries(study.name, *compared_cells(study, expansion, results | fine))
    assert {entry.correction for entry in measured} - {"none", "error_feedback+sync_start"} == {name} - {None}
    assert all(("fine start of 20 %" in entry.source) == (entry.correction == name) for entry in measured)


def test_synchronous_runs_from_before_there_was_a_setting_count(b_study):
    study, expansion, results = b_study
    before = {}
    for name, result in results.items():
        known = {key: value for key, value in result.settings.items() if key != "pipeline.least_stages"}
        since = result.settings | {"pipeline.least_stages": 1}
        settings = known if result.settings["pipeline.delay"] == 0 else since
        before[name] = Result(**(vars(result) | {"settings": settings}))
    cells = compared_cells(study, expansion, before)
    assert len(entries(study.name, *cells)) == len(entries(study.name, *compared_cells(*b_study))) > 0


def test_what_the_planner_has_no_word_for_is_left_out(b_study):
    study, expansion, results = b_study
    odd = {}
    for name, result in results.items():
        changed = dict(result.settings)
        if changed["optim.correction"] == "error_feedback":
            changed["optim.options"] = {"lookahead": 2}  # and the synchronous runs have none
        odd[name] = Result(**(vars(result) | {"settings": changed}))
    measured = entries(study.name, *compared_cells(study, expansion, odd))
    assert {entry.correction for entry in measured} == {"none"}


def test_longer_runs_than_the_synchronous_ones_are_no_penalty_of_the_planners(b_study):
    study, expansion, results = b_study
    longer = {
        name: Result(**(vars(result) | {"settings": result.settings | {"train.steps": 9999}}))
        for name, result in results.items()
        if result.settings["optim.correction"] == "error_feedback"
    }
    measured = entries(study.name, *compared_cells(study, expansion, results | longer))
    assert {entry.correction for entry in measured} == {"none"}


def test_of_runs_of_several_lengths_the_planner_gets_the_longest():
    study = load_study(FILE.with_name("a-length.toml"))
    expansion, results = study.expand({}), {}
    for point in expansion.points:
        config = point.config
        tokens = float(config.train.steps * config.tokens_per_step)
        gap = 0.0 if point.labels["mode"] == "sync" else 60 / config.train.steps
        results[point.digest] = Result(
            point.digest, point.folder, settings(config), loss=20 - math.log(tokens) + gap,
            steps=config.train.steps, tokens=tokens, parameters=42_000_000,
        )  # fmt: skip
    measured = entries(study.name, *compared_cells(study, expansion, results))
    assert sorted((entry.batch_tokens, entry.correction) for entry in measured) == [
        (16384, "error_feedback"), (16384, "none"), (65536, "error_feedback"), (65536, "none"),
    ]  # fmt: skip
    assert {entry.gap for entry in measured} == {0.01}  # at 6000 updates


def test_a_table_is_refreshed_in_place(tmp_path):
    path = tmp_path / "penalty.json"
    path.write_text(json.dumps({"about": "x", "provisional": True, "entries": [
        {"optimizer": "muon", "correction": "none", "penalty": 1.15, "batch_tokens": 16384, "parameters": 4.2e7},
        {"optimizer": "muon", "correction": "none", "penalty": 1.06, "batch_tokens": 1e6, "parameters": 3.6e8},
    ]}))  # fmt: skip
    new = Penalty("muon", "none", 1.2, 16384, 42_082_816, "study x: 3 seeds", 0.05)
    replaced = write_penalties(path, [new])
    assert [entry.penalty for entry in replaced] == [1.15]
    assert [entry.penalty for entry in load_penalties(path)] == [1.2, 1.06]
    assert json.loads(path.read_text())["provisional"] is True
    assert write_penalties(path, [new]) == [new]  # again: the same table
    assert find_penalty(load_penalties(path), "muon", "none", 2e4, 5e7) == new
    write_penalties(tmp_path / "new" / "fresh.json", [new])
    assert load_penalties(tmp_path / "new" / "fresh.json") == (new,)


def test_from_the_command_line(tmp_path, b_study, capsys):
    _, _, results = b_study
    export = tmp_path / "b-muon-adamw.jsonl.gz"
    write_export(export, results.values())
    table = tmp_path / "penalty.json"
    with pytest.raises(SystemExit) as ended:
        main(["study", "table", str(FILE), "--results", str(export), "--penalty", str(table)])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "6 entries written, 0 replaced" in told
    assert len(load_penalties(table)) == 6
    page = (tmp_path / "b-muon-adamw.html").read_text()
    assert "token penalty by length" in page
    assert "<script" in page  # curves are drawn by the page itself: nothing else is loaded
    assert "src=" not in page.replace("data:", "")

"""A run that failed keeps what it had measured, in its folder and in an export, and counts nowhere as ended well."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.study.test_run import SMALLER, TOY, HerePool, command
from tests.train.conftest import make_data
from tests.train.jobs import poison

from slipstream.metrics.events import EVENTS_FILE
from slipstream.study.cells import all_cells, roles_of
from slipstream.study.page import notes_of
from slipstream.study.parse import load_study
from slipstream.study.results import FAILED_FILE, Result, collect, losses, read_folder
from slipstream.study.run import Clock, Limits, run_study
from slipstream.study.show import Show

NAME = "seed=0 optimizer=muon mode=sync"


@pytest.fixture
def failed(tmp_path, monkeypatch):
    """A study with one run that failed at its seventh step of eight: its data gave no finite loss from the sixth on."""
    settings = [*SMALLER, f"data.path={make_data(tmp_path / 'data')}", "health.max_skipped=2"]
    study = load_study(TOY, settings)
    monkeypatch.setattr("slipstream.study.run.Pool", HerePool)
    monkeypatch.setattr(Clock, "left", lambda *_: None)
    with monkeypatch.context() as patch:
        poison(patch.setattr, {5: "nan", 6: "nan"})
        outcome = run_study(study, tmp_path / "out", Limits(only=NAME), Show(tmp_path))
    assert list(outcome.failed) == [NAME]
    return study, tmp_path / "out", settings


def only(found: dict[str, Result]) -> Result:
    (result,) = found.values()
    return result


def test_a_failed_run_keeps_what_it_had_measured(failed, tmp_path):
    _, out, settings = failed
    result = only(collect(out))
    assert result.loss is None
    assert "2 updates in a row were not finite" in result.failed
    assert "All weights are finite" in result.failed
    per_step = 7 * [result.tokens / 7]
    assert (result.steps, result.skipped) == (7, 2)
    assert [x for x, _ in result.validation] == [sum(per_step[:4])]
    assert [x for x, _ in result.training] == pytest.approx([sum(per_step[:n]) for n in range(1, 6)])
    assert result.seconds > 0
    assert result.tokens_per_second
    assert result.parameters
    assert result.device
    assert result.data
    assert result.held_out
    assert result.source
    assert "torch" in result.versions
    command("export", TOY, *settings, "--results", out, "--out", tmp_path / "kept")
    assert collect(tmp_path / "kept" / "toy.jsonl.gz") == collect(out), "the export holds all of it"


def test_a_failed_run_counts_nowhere_as_one_that_ended_well(failed, tmp_path, capsys):
    study, out, settings = failed
    command("export", TOY, *settings, "--results", out, "--out", tmp_path / "kept")
    kept = tmp_path / "kept" / "toy.jsonl.gz"
    for place in (out, kept):
        found = collect(place)
        assert list(losses(found).values()) == [None]
        expansion = study.expand(losses(found))
        (cell,) = all_cells(expansion.points, found, roles_of(study))
        assert (cell.results, len(cell.failed)) == ({}, 1)
        (point,) = [point for point in expansion.points if point.digest in found]
        assert Clock(found).seconds(point) is None, "its time says nothing of a whole run's"
    # On record, here or in what `--also` names, it is not run again unasked, and the exit code says that it failed.
    other = tmp_path / "other"
    run = ("run", TOY, *settings, "--only", NAME, "--out")
    command(*run, out, code=3)
    command(*run, other, "--also", kept, code=3)
    assert "1 more failed before" in capsys.readouterr().out
    outcome = run_study(study, other, Limits(only=NAME, retry=True), Show(tmp_path), [kept])
    assert (outcome.finished, outcome.failed_before) == ([NAME], 0)
    assert only(collect(kept, other)).loss is not None


def test_a_failed_run_is_tried_again_in_its_folder(failed, tmp_path):
    study, out, _ = failed
    outcome = run_study(study, out, Limits(only=NAME, retry=True), Show(tmp_path))
    assert outcome.finished == [NAME]
    assert (only(collect(out)).steps, only(collect(out)).failed) == (8, "")


def test_runs_are_not_said_to_differ_from_one_that_failed(failed):
    study, out, _ = failed
    found = collect(out)
    one = only(found)
    points = study.expand({}).points
    other = next(point for point in points if point.digest != one.digest)
    found[other.digest] = replace(one, digest=other.digest, loss=1.0, failed="", device="another")
    assert not [note for note in notes_of(study.expand({}), found) if "do not share" in note]


def cut(events: Path) -> None:
    events.write_text(events.read_text() + '{"event": "step", "st')


def test_a_line_that_was_cut_off_costs_no_more_than_itself(failed):
    _, out, _ = failed
    whole = only(collect(out))
    cut(out / whole.run / EVENTS_FILE)
    assert only(collect(out)) == whole


def garbled(events: Path) -> None:
    events.write_bytes(events.read_bytes().replace(b'"step"', b'\xff"st'))


def without_a_start(events: Path) -> None:
    events.write_text(events.read_text().split("\n", 1)[1])


def beyond_the_end(events: Path) -> None:
    events.write_text(events.read_text() + json.dumps({"event": "step", "step": 10**400, "loss": 1.0}) + "\n")


def of_another_run(events: Path) -> None:
    config = events.with_name("config.toml")
    config.write_text(config.read_text().replace("steps = 8", "steps = 9"))


def no_config(events: Path) -> None:
    events.with_name("config.toml").unlink()


DAMAGE = [Path.unlink, Path.write_bytes, garbled, without_a_start, beyond_the_end, of_another_run, no_config]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_of_a_log_that_cannot_be_trusted_the_message_is_left(failed, damage):
    _, out, _ = failed
    whole = only(collect(out))
    events = out / whole.run / EVENTS_FILE
    damage(events, b"") if damage is Path.write_bytes else damage(events)
    left = read_folder(out / whole.run)
    assert left == Result(whole.digest, whole.run, whole.settings, failed=whole.failed)


def test_without_a_readable_record_of_its_failure_it_is_run_again(failed):
    _, out, _ = failed
    folder = out / only(collect(out)).run
    (folder / FAILED_FILE).write_text("{")
    assert read_folder(folder) is None

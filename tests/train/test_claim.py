"""A run writes into a folder that is new, empty or its own: what else lies in one is left as it is."""

from __future__ import annotations

import pytest

from slipstream.cli import main
from slipstream.errors import UserError
from slipstream.train.claim import is_run, refuse_foreign


def test_a_folder_with_files_of_the_users_is_refused_and_untouched(tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.toml").write_text("theirs = 1\n")
    (mine / "report.html").write_text("my report")
    with pytest.raises(SystemExit) as ended:
        main(["train", f"run.dir={mine}", "train.steps=1"])
    assert ended.value.code == 2
    told = " ".join(capsys.readouterr().err.split())
    assert (
        "holds files that are no run of slipstream's (config.toml, report.html). Nothing was changed." in told
    )
    assert "Set run.dir to a folder that is new or empty" in told
    assert {path.name: path.read_text() for path in mine.iterdir()} == {
        "config.toml": "theirs = 1\n",
        "report.html": "my report",
    }


@pytest.mark.parametrize(
    "held", ["lock", "events.jsonl", "checkpoints/step-00000004/manifest.json", ".hidden"]
)
def test_what_a_run_left_behind_and_an_empty_folder_are_taken(tmp_path, held):
    (tmp_path / held).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / held).write_text("")
    refuse_foreign(tmp_path)


def test_a_lock_or_a_log_of_somebody_else_is_no_run(tmp_path):
    (tmp_path / "lock").write_text("held by emacs\n")
    (tmp_path / "events.jsonl").write_text('{"user": 3}\n')
    assert not is_run(tmp_path)
    with pytest.raises(UserError, match=r"events\.jsonl, lock"):
        refuse_foreign(tmp_path)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is a file"):
        refuse_foreign(tmp_path / "run")


def test_the_ranks_of_torchrun_refuse_it_too(runs):
    folder = runs.folder / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"no run of slipstream's \(notes.txt\)"):
        runs.train("run", "pipeline.schedule=emulate")
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]

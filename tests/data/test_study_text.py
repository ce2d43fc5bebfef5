"""The recipe of the studies' text: which lines of a page are kept, the pages that are listed, and the one command."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pages import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import study_text

PAGE = """<doc id="12" url="http://en.wikipedia.org/wiki?curid=12" title="Anarchism &quot;A&quot;">
Anarchism

Anarchism (; from Greek) is\xa0a philosophy () that  advocates <b>stateless</b> societies.
! a table's head
<poem>A line of verse
It has formula_1 and https://example.org
One line<br>and another &amp; more, of which nothing is a heading.
References.
External links.
</doc>
<doc id="7" url="http://en.wikipedia.org/wiki?curid=7" title="Other">
Other
</doc>
"""
CLEAN = (
    "Anarchism\n"
    "Anarchism (from Greek) is a philosophy that advocates stateless societies.\n"
    "One line\n"
    "and another & more, of which nothing is a heading."
)


WANTED = {"train": {"pages": [7, 12]}, "valid": {"pages": [7]}}
TEXTS = {"train": f"Other\n\f\n{CLEAN}\n", "valid": "Other\n"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text" / "AA").mkdir(parents=True)
    (tmp_path / "text" / "AA" / "wiki_00").write_text(PAGE, encoding="utf-8")
    return tmp_path / "text"


def test_prose_is_kept_and_markup_is_not(folder, tmp_path):
    (tmp_path / "out").mkdir()
    found = study_text.write(folder, tmp_path / "out", WANTED)
    assert written(tmp_path / "out") == TEXTS
    assert found == {name: hashlib.sha256(text.encode()).hexdigest() for name, text in TEXTS.items()}


def test_a_folder_without_the_pages_is_refused(folder, tmp_path):
    with pytest.raises(
        SystemExit, match=r"lacks page 13 and 0 more\. The source is the folder `text` of http"
    ):
        study_text.write(folder, tmp_path / "out", {"train": {"pages": [13]}})


def test_no_page_is_listed_twice():
    listed = json.loads(study_text.PAGES.read_text())
    train, valid = listed["train"]["pages"], listed["valid"]["pages"]
    assert (len(train), len(valid)) == (12_580, 374)
    assert len({*train, *valid}) == len(train) + len(valid)


# The one command, on a repository of the same layout -----------------------------------------------------


def written(out: Path) -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in out.glob("*.txt")}


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def source(folder, tmp_path, monkeypatch) -> SimpleNamespace:
    """A repository whose pages are in an old commit alone, and what is pinned of it."""
    git(tmp_path, "init", "--quiet", ".")
    git(tmp_path, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(tmp_path, "add", "text")
    git(tmp_path, "commit", "--quiet", "--message", "pages")
    monkeypatch.setattr(study_text, "REVISION", git(tmp_path, "rev-parse", "HEAD"))
    git(tmp_path, "rm", "--quiet", "-r", "text")
    git(tmp_path, "commit", "--quiet", "--message", "no pages")
    pinned = {
        name: WANTED[name] | {"sha256": digest, "studies": digest if name == "valid" else "0" * 64}
        for name, digest in (
            (name, hashlib.sha256(text.encode()).hexdigest()) for name, text in TEXTS.items()
        )
    }
    listed = tmp_path / "pages.json"
    listed.write_text(json.dumps(pinned))
    monkeypatch.setattr(study_text, "PAGES", listed)
    return SimpleNamespace(
        url=f"file://{tmp_path}", pinned=pinned, listed=listed, out=tmp_path / "data" / "made"
    )


def refused(*words: object) -> str:
    with pytest.raises(SystemExit) as ended:
        study_text.main([str(word) for word in words])
    assert isinstance(ended.value.code, str)  # words, and no traceback
    return ended.value.code


def test_one_command_fetches_converts_checks_and_says_what_is_next(source, capfd, monkeypatch):
    study_text.main([str(source.out), "--repository", source.url])
    assert written(source.out) == TEXTS
    assert {path.name for path in source.out.iterdir()} == {
        "train.txt",
        "valid.txt",
    }  # the source is not kept
    told = capfd.readouterr().out
    assert f"{source.out}/valid.txt: the text of the studies, to the last byte" in told
    assert f"{source.out}/train.txt: the text of the studies, but for a few lines" in told
    files = f"{source.out}/train.txt --valid {source.out}/valid.txt"
    assert f"slipstream data prepare {files} --vocab 16384 --out data/wiki16k" in told
    assert f"slipstream data prepare {files} --vocab 8192 --out data/wiki8k" in told
    # Again: nothing is fetched.
    monkeypatch.setattr(study_text, "fetch", lambda *_: pytest.fail("fetched again"))
    study_text.main([str(source.out)])


def test_a_file_that_is_not_what_it_should_be_is_made_anew(source):
    source.out.mkdir(parents=True)
    (source.out / "train.txt").write_text("half of it")
    study_text.main([str(source.out), "--repository", source.url])
    assert written(source.out) == TEXTS


def test_text_that_is_another_never_has_the_names(source):
    pinned = source.pinned | {"valid": source.pinned["valid"] | {"sha256": "1" * 64}}
    source.listed.write_text(json.dumps(pinned))
    assert "valid.txt is not what it should be" in refused(source.out, "--repository", source.url)
    assert list(source.out.iterdir()) == []


def test_a_copy_of_the_repository_may_be_a_path_from_here(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    study_text.main([str(source.out), "--repository", tmp_path.name])
    assert written(source.out) == TEXTS


def test_a_folder_at_hand_needs_no_repository(source, folder, monkeypatch):
    monkeypatch.setattr(study_text, "fetch", lambda *_: pytest.fail("fetched"))
    (folder / "AA").mkdir(parents=True)
    (folder / "AA" / "wiki_00").write_text(PAGE, encoding="utf-8")
    study_text.main([str(source.out), "--folder", str(folder)])
    assert written(source.out) == TEXTS


def test_a_wrong_folder_is_named(source, tmp_path):
    assert f"There is no folder {tmp_path}/none" in refused(source.out, "--folder", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "empty holds no pages (*/wiki_*)" in refused(source.out, "--folder", tmp_path / "empty")
    (tmp_path / "empty" / "AA").mkdir()
    (tmp_path / "empty" / "AA" / "wiki_00").write_bytes(b"\xff\xfe")
    assert "no UTF-8" in refused(source.out, "--folder", tmp_path / "empty")


def test_a_source_that_cannot_be_reached_is_told_in_gits_words_and_ours(source, tmp_path, capfd):
    told = refused(source.out, "--repository", f"file://{tmp_path}/none")
    assert "git fetch of" in told
    assert "It needs the network" in told
    assert "none" in capfd.readouterr().err
    assert list(source.out.iterdir()) == []


def test_without_git_it_says_what_to_install(source, monkeypatch):
    monkeypatch.setattr(study_text.shutil, "which", lambda name: None)
    assert "Install git, or give --folder" in refused(source.out)


def test_a_full_disk_is_told_before_and_while_it_works(source, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "train.txt")

    monkeypatch.setattr(study_text, "write", full)
    assert "train.txt: No space left on device. Free the disk" in refused(
        source.out, "--repository", source.url
    )
    assert list(source.out.iterdir()) == []
    monkeypatch.setattr(study_text.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * 10**6))
    assert "has 5 MB left, and this needs 820" in refused(source.out)


def test_help_is_a_page_and_the_names_are_the_pinned_ones():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/study_text.py", "--help"], capture_output=True, text=True, check=True
    )
    assert "--folder" in done.stdout
    assert "jason-feng/wikiVisual" in done.stdout

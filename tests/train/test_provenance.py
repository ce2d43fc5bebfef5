"""A run names its code wherever it runs: in a checkout, and from a copy that nobody installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream import __version__
from slipstream.train import provenance

ASK = (
    "import json; from slipstream.train import provenance as p; "
    "print(json.dumps([p.versions(), p.code().commit, p.code().source]))"
)


def test_a_copy_of_the_files_knows_its_version_and_fingerprint_but_no_commit(tmp_path):
    """As on a machine that got the files alone: no metadata of an installed package, no repository."""
    shutil.copytree(provenance.HOME, tmp_path / "slipstream", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    versions, commit, source = json.loads(done.stdout)
    assert versions["slipstream"] == __version__
    assert commit is None
    assert source == provenance.source_fingerprint()


def test_the_version_needs_no_installed_package(monkeypatch):
    monkeypatch.setattr(provenance, "_version", lambda package: None)
    assert provenance.versions()["slipstream"] == __version__


def test_every_byte_and_every_name_counts(tmp_path):
    def fingerprint(**files: str) -> str:
        home = tmp_path / str(len(list(tmp_path.iterdir())))
        home.mkdir()
        for name, text in files.items():
            (home / f"{name}.py").write_text(text)
        return provenance.source_fingerprint(home)

    prints = [
        fingerprint(a="x", b="y"),
        fingerprint(a="x", b="z"),
        fingerprint(a="x", c="y"),
        fingerprint(a="xy"),
    ]
    assert len(set(prints)) == 4
    assert fingerprint(b="y", a="x") == prints[0]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A repository laid out like ours, with one commit."""
    for name in ("pyproject.toml", ".gitignore", "README.md", "src/slipstream/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("__pycache__/\n" if name == ".gitignore" else "")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_repository_without_a_commit_has_no_name(tmp_path):
    (tmp_path / "__init__.py").write_text("")
    assert provenance.commit(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert provenance.commit(tmp_path) is None
    git(tmp_path, "add", ".")
    assert provenance.commit(tmp_path) is None
    git(tmp_path, "commit", "--quiet", "-m", "first")
    assert provenance.commit(tmp_path) == git(tmp_path, "rev-parse", "HEAD")


def test_a_copy_that_a_repository_does_not_hold_has_no_commit(checkout):
    """As an installed package below somebody's own checkout."""
    (checkout / ".gitignore").write_text("lib/\n")
    shutil.copytree(checkout / "src", checkout / "lib")
    assert provenance.commit(checkout / "lib" / "slipstream") is None


@pytest.mark.parametrize(
    "name", ["README.md", "docs/new.md", "src/slipstream/__pycache__/x.pyc", "src/other.py"]
)
def test_a_clean_package_is_named_by_its_commit_whatever_else_has_changed(checkout, name):
    (checkout / name).parent.mkdir(exist_ok=True)
    (checkout / name).write_text("changed\n")
    git(checkout, "add", "--all")
    (checkout / name).write_text("and once more\n")
    assert provenance.commit(checkout / "src/slipstream") == git(checkout, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    "name",
    ["pyproject.toml", "src/slipstream/__init__.py", "src/slipstream/new.py", "src/slipstream/table.json"],
)
@pytest.mark.parametrize("staged", [False, True])
def test_a_package_that_differs_from_its_commit_says_so(checkout, name, staged):
    (checkout / name).write_text("changed = True\n")
    if staged:
        git(checkout, "add", "--all")
    head = git(checkout, "rev-parse", "HEAD")
    assert provenance.commit(checkout / "src/slipstream") == f"{head}-dirty"
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "-m", "second")
    assert provenance.commit(checkout / "src/slipstream") == git(checkout, "rev-parse", "HEAD") != head


def test_commit_and_fingerprint_stay_those_of_the_first_moment(checkout):
    """A process runs for hours while its checkout goes on: what it names is what it began with."""
    home = checkout / "src/slipstream"
    first = provenance.code(home)
    assert first == provenance.Code(git(checkout, "rev-parse", "HEAD"), provenance.source_fingerprint(home))
    (home / "__init__.py").write_text("changed = True\n")
    git(checkout, "commit", "--quiet", "--all", "-m", "second")
    assert provenance.code(home) == first
    assert provenance.commit(home) != first.commit
    assert provenance.source_fingerprint(home) != first.source

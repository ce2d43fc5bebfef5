"""Which commit made a published run: the fingerprint of its code decides, and the page of the runs says it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pages import ROOT
from slipstream.errors import UserError
from slipstream.study.results import Result
from slipstream.train.provenance import source_fingerprint

sys.path.insert(0, str(ROOT / "tools"))
import run_sources

WHO = ["-c", "user.name=t", "-c", "user.email=t@example.org"]


class Checkout:
    """A repository with a package, a commit a day."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.days = folder, folder / run_sources.PACKAGE, 0
        self.git("init", "--quiet")

    def git(self, *words: str) -> str:
        date = f"2026-01-{self.days + 1:02d}T00:00:00+00:00"
        done = subprocess.run(
            ["git", "-C", str(self.folder), *WHO, *words],
            env={"GIT_COMMITTER_DATE": date, "GIT_AUTHOR_DATE": date, "PATH": "/usr/bin:/bin:/usr/local/bin"},
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    def write(self, files: dict[str, str]) -> str:
        """The fingerprint, as a run would note it."""
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return source_fingerprint(self.home)

    def commit(self, files: dict[str, str]) -> tuple[str, str]:
        source = self.write(files)
        self.days += 1
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "next")
        return self.git("rev-parse", "HEAD"), source


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def inside(**files: str) -> dict[str, str]:
    return {f"{run_sources.PACKAGE}/{name.replace('__', '/')}.py": text for name, text in files.items()}


def test_every_commit_has_the_fingerprint_that_a_run_from_it_would_note(checkout):
    """Folders, names that sort otherwise as paths than as parts, files that are no Python, and a file that is gone."""
    made = [
        checkout.commit(inside(a="1", train__b="2", train__deep__c="3") | {"src/slipstream/t.json": "{}"}),
        checkout.commit(inside(train__b="4") | {f"{run_sources.PACKAGE}/train-x.py": "é"}),
    ]
    (checkout.home / "a.py").unlink()
    made.append(checkout.commit({}))
    history = run_sources.History(checkout.folder)
    assert history.first == {source: commit for commit, source in made}
    assert [history.made(commit, source) for commit, source in made] == [commit for commit, _ in made]


def test_the_fingerprint_decides_and_not_the_name_of_the_commit(checkout):
    first, old = checkout.commit(inside(a="1"))
    same, _ = checkout.commit({"README.md": "of other files"})
    second, new = checkout.commit(inside(a="2"))
    back, _ = checkout.commit(inside(a="1"))
    never = checkout.write(inside(a="3"))
    made = run_sources.History(checkout.folder).made
    assert made(f"{first}-dirty", old) == first  # only other files differed
    assert made(same, old) == same  # its own commit goes before an older one of equal files
    assert made(f"{back}-dirty", old) == back
    assert made(f"{second}-dirty", old) == first  # files of another commit
    assert made("0" * 40, new) == second  # a commit that is in no history
    assert made("", new) == second  # a copy of the files
    assert made(f"{second}-dirty", never) == run_sources.NOWHERE
    assert made("", "") == made(first, "") == run_sources.NOTHING


def test_packages_that_came_by_a_merge_are_found(checkout):
    checkout.commit(inside(a="1", b="1"))
    checkout.git("checkout", "--quiet", "-b", "side")
    side, of_side = checkout.commit(inside(a="2"))
    checkout.git("checkout", "--quiet", "-")
    checkout.commit(inside(b="2"))
    checkout.days += 1
    checkout.git("merge", "--quiet", "--no-edit", "side")
    merged = source_fingerprint(checkout.home)
    history = run_sources.History(checkout.folder)
    assert history.made("", of_side) == side
    assert history.made("", merged) == checkout.git("rev-parse", "HEAD")


def test_the_table_counts_the_runs_of_each_export_and_the_summary_every_run_once(checkout):
    commit, source = checkout.commit(inside(a="1"))
    one = Result("1", "one", {}, device="H200", commit=f"{commit}-dirty", source=source)
    two = Result("2", "two", {}, device="H200")
    other = Result("3", "three", {}, device="H200", commit=commit, source="unknown")
    small = Result("4", "four", {}, device="cpu")
    runs = {"b": [two, one, other], "a": [two, small], "c": [small]}
    history = run_sources.History(checkout.folder)
    assert run_sources.rows(runs, history)[2:] == [
        f"| b | 3 | {commit[:7]}: 1, in no commit: 1, not noted: 1 |",
        "| a 2, c 1 | 3 | not noted |",
    ]
    assert run_sources.summary(runs, history) == (
        "Runs, each counted once: 3 on a GPU (1 by a known commit, 1 in no commit, 1 not noted) and "
        "1 on a CPU (1 not noted)."
    )


@pytest.mark.parametrize("kind", ["no repository", "no commit", "shallow"])
def test_without_a_history_it_says_what_to_do(checkout, tmp_path, kind):
    folder = tmp_path / "other"
    folder.mkdir()
    if kind == "shallow":
        checkout.commit(inside(a="1"))
        checkout.commit(inside(a="2"))
        checkout.git("clone", "--quiet", "--depth=1", f"file://{checkout.folder}", str(folder))
    elif kind == "no commit":
        subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    else:
        (checkout.folder / ".git").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="Clone the repository"):
        run_sources.History(folder)


def test_the_page_says_who_made_the_published_runs():
    try:
        history = run_sources.History()
    except UserError as error:
        pytest.skip(str(error))
    runs, page = run_sources.published(), (ROOT / "docs/results/runs.md").read_text()
    assert "\n".join(run_sources.rows(runs, history)) in page, "python tools/run_sources.py"
    assert run_sources.summary(runs, history) in page
    # What the page says of the option of Muon that is gone: no run set it.
    assert not [
        r.run for results in runs.values() for r in results if "optim.options.polynomial" in r.settings
    ]

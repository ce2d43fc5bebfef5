"""The recipe of the studies' text: which lines of a page are kept, and that the listed pages are those."""

from __future__ import annotations

import hashlib
import json
import sys

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


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text" / "AA").mkdir(parents=True)
    (tmp_path / "text" / "AA" / "wiki_00").write_text(PAGE, encoding="utf-8")
    return tmp_path / "text"


def test_prose_is_kept_and_markup_is_not(folder, tmp_path):
    wanted = {"train": {"pages": [7, 12]}, "valid": {"pages": [7]}}
    found = study_text.write(folder, tmp_path / "out", wanted)
    text = f"Other\n\f\n{CLEAN}\n"
    assert (tmp_path / "out" / "train.txt").read_text(encoding="utf-8") == text
    assert (tmp_path / "out" / "valid.txt").read_text(encoding="utf-8") == "Other\n"
    assert found["train"] == hashlib.sha256(text.encode()).hexdigest()


def test_a_folder_without_the_pages_is_refused(folder, tmp_path):
    with pytest.raises(SystemExit, match=r"lacks page 13 and 0 more\. Is it the folder of that commit"):
        study_text.write(folder, tmp_path / "out", {"train": {"pages": [13]}})


def test_no_page_is_listed_twice():
    listed = json.loads(study_text.PAGES.read_text())
    train, valid = listed["train"]["pages"], listed["valid"]["pages"]
    assert (len(train), len(valid)) == (12_580, 374)
    assert len({*train, *valid}) == len(train) + len(valid)

"""The embedded corpus: found, cached once, and the same for every process that asks."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slipstream.data import corpus
from slipstream.data.shards import read_meta
from slipstream.data.tokens import TokenDataset
from slipstream.errors import DataError


@pytest.fixture
def few_sources(monkeypatch):
    """A dozen modules instead of a thousand: the cache's behaviour does not depend on how many."""
    few = corpus.sources()[:12]
    monkeypatch.setattr(corpus, "sources", lambda: few)


def test_the_library_is_found_without_its_tests():
    found = corpus.sources()
    names = {path.name for path in found}
    assert {"argparse.py", "typing.py", "heapq.py"} <= names
    assert not any({"test", "tests", "site-packages", "encodings"} & set(path.parts[-3:-1]) for path in found)
    assert sum(path.stat().st_size for path in found) > 8e6


def test_it_is_made_once_and_then_found(few_sources, tmp_path):
    with ThreadPoolExecutor(4) as pool:  # several ranks at once
        folders = set(pool.map(lambda _: corpus.embedded(300, tmp_path), range(4)))
    assert len(folders) == 1
    folder = folders.pop()
    stamp = (folder / "meta.json").stat().st_mtime_ns
    assert corpus.embedded(300, tmp_path) == folder
    assert (folder / "meta.json").stat().st_mtime_ns == stamp
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, f"{folder.name}.lock"]
    assert TokenDataset(folder, "train", 64, 2, vocab=300).batch(0)[0].shape == (2, 64)
    assert read_meta(folder)["documents"]["valid"] >= 1
    assert corpus.embedded(301, tmp_path) != folder


def test_other_sources_are_another_corpus(few_sources, tmp_path, monkeypatch):
    first = corpus.embedded(257, tmp_path)
    monkeypatch.setattr(corpus, "documents", lambda: iter(["one\n", "two\n", "three\n"]))
    assert corpus.embedded(257, tmp_path) != first


def test_no_sources_and_no_cache_say_what_to_set(few_sources, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.path"):
        corpus.embedded(257, tmp_path / "file" / "cache")
    monkeypatch.undo()
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "nothing")})
    with pytest.raises(DataError, match="no library sources"):
        corpus.sources()


def test_the_cache_is_in_the_users_home():
    assert corpus.cache_folder() == Path.home() / ".cache" / "slipstream"
    assert sys.prefix not in str(corpus.cache_folder())

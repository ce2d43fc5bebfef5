"""Shards are known again by every byte, and seldom read whole."""

import os

import pytest

from slipstream.data import contents
from slipstream.errors import DataError

MEBIBYTE = 1 << 20


@pytest.fixture
def large(tmp_path, monkeypatch):
    """Two files that count as large, and a cache of their own."""
    monkeypatch.setattr(contents, "FULL_BYTES", MEBIBYTE)
    monkeypatch.setattr(contents, "cache_folder", lambda: tmp_path / "cache")
    paths = [tmp_path / f"train_{index}.bin" for index in range(2)]
    for path in paths:
        path.write_bytes(os.urandom(6 * MEBIBYTE))
    return paths


def test_a_byte_between_the_samples_is_seen(large):
    """64 blocks were all that was read of a large shard: 100,000 changed bytes in one went unseen."""
    before = contents.digests(large)
    with large[1].open("r+b") as file:
        file.seek(70_000)  # behind the first block, ahead of the second
        sampled = list(contents.blocks(large[1]))
        file.write(b"\0" * 10_000)
    assert list(contents.blocks(large[1])) == sampled
    after = contents.digests(large)
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)


def test_times_set_back_hide_nothing(large):
    before, stat = contents.digests(large), large[0].stat()
    with large[0].open("r+b") as file:
        file.seek(70_000)
        file.write(b"\0" * 10_000)
    os.utime(large[0], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert contents.digests(large)[0] != before[0]


def test_a_file_that_was_not_touched_is_not_read_whole(large, monkeypatch):
    before = contents.digests(large)
    monkeypatch.setattr(contents, "_read", lambda path: pytest.fail("read whole"))
    assert contents.digests(large) == before


def test_a_damaged_note_is_no_trouble(large, tmp_path):
    before = contents.digests(large)
    for note in (tmp_path / "cache" / "digests").iterdir():
        note.write_text("{")
    assert contents.digests(large) == before


def test_a_shard_that_is_not_as_it_was_prepared_is_refused(tmp_path):
    path = tmp_path / "train_000000.bin"
    path.write_bytes(b"tokens")
    found = contents.digests([path])
    contents.check_as_prepared([path], found, {"train_000000.bin": found[0]})
    contents.check_as_prepared([path], found, {})
    path.write_bytes(b"tokenz")
    with pytest.raises(DataError, match=r"train_000000\.bin is not what `slipstream data prepare` wrote"):
        contents.check_as_prepared([path], contents.digests([path]), {"train_000000.bin": found[0]})

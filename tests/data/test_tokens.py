"""Laws of the order: every window once an epoch, any group at once, the same whatever the layout."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.shards import fingerprint, open_shard, token_dtype, write_shard
from slipstream.data.tokens import IGNORE, Prefetch, TokenDataset, permute
from slipstream.errors import DataError


def folder_of(tmp_path, *sizes, vocab=1000, meta=None):
    """Train shards whose tokens count 0, 1, 2, ... over the whole stream, so content tells position."""
    start = 0
    for number, size in enumerate(sizes):
        tokens = np.arange(start, start + size) % vocab
        write_shard(tmp_path / f"any_train_{number:03d}.bin", tokens.astype(token_dtype(vocab)))
        start += size
    if meta is not None:
        (tmp_path / "meta.json").write_text(json.dumps(meta))
    return tmp_path


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_permute_is_a_permutation(size, seed, epoch):
    image = permute(np.arange(size), size, seed, epoch)
    assert sorted(image.tolist()) == list(range(size))


def test_permute_mixes_and_depends_on_seed_and_epoch():
    n = 10_000
    base = permute(np.arange(n), n, 0, 0)
    assert not np.array_equal(base, permute(np.arange(n), n, 1, 0))
    assert not np.array_equal(base, permute(np.arange(n), n, 0, 1))
    assert abs(np.corrcoef(np.arange(n), base)[0, 1]) < 0.05
    assert abs(np.corrcoef(base[:-1], base[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(base)) == 1).mean() < 0.01


def test_permute_of_a_huge_range_costs_nothing():
    image = permute(np.array([0, 1, 2**45]), 2**45 + 3, 0, 0)
    assert len(set(image.tolist())) == 3
    assert image.max() < 2**45 + 3


def test_an_epoch_reads_every_window_once_and_targets_follow_inputs(tmp_path):
    data = TokenDataset(folder_of(tmp_path, 50, 1, 74), "train", sequence=6, batch=4, seed=9)
    assert data.num_tokens == 125
    assert data.num_windows == 20
    epochs = []
    for epoch in range(2):
        rows = [data.batch(epoch * 5 + g) for g in range(5)]
        inputs, targets = torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])
        assert inputs.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)  # across shard ends too
        assert sorted(inputs[:, 0].tolist()) == list(range(0, 120, 6))
        epochs.append(inputs[:, 0].tolist())
    assert epochs[0] != epochs[1]


def test_a_group_is_a_pure_function_and_batches_of_any_size_tile_the_same_order(tmp_path):
    folder = folder_of(tmp_path, 600)
    whole = TokenDataset(folder, "train", 8, 12, seed=3)
    again = TokenDataset(folder, "train", 8, 12, seed=3)
    assert torch.equal(whole.batch(40)[0], again.batch(40)[0])  # seeking, without reading 0 ... 39
    parts = TokenDataset(folder, "train", 8, 4, seed=3)
    for group in (0, 5, 6, 19):  # 74 windows: some groups straddle two epochs
        cut = torch.cat([parts.batch(3 * group + i)[0] for i in range(3)])
        assert torch.equal(whole.batch(group)[0], cut)
    assert not torch.equal(whole.batch(0)[0], TokenDataset(folder, "train", 8, 12, seed=4).batch(0)[0])


def test_without_shuffle_windows_come_in_order(tmp_path):
    write_shard(tmp_path / "x_val_0.bin", np.arange(33, dtype="<u2"))
    data = TokenDataset(tmp_path, "valid", 8, 2, shuffle=False)
    assert data.batch(1)[0][:, 0].tolist() == [16, 24]


def test_document_ends_are_not_counted(tmp_path):
    folder = folder_of(tmp_path, 60, vocab=10, meta={"end_of_document": 4, "vocab": 10})
    inputs, targets = TokenDataset(folder, "train", 12, 3, mask_document_ends=True).batch(0)
    plain = TokenDataset(folder, "train", 12, 3).batch(0)[1]
    assert (inputs == 4).any()
    assert torch.equal(targets == IGNORE, inputs == 4)
    assert torch.equal(targets[inputs != 4], plain[inputs != 4])


@pytest.mark.parametrize("vocab", [50, 1 << 16, 100_000])
def test_shards_come_back_as_written(tmp_path, vocab):
    tokens = np.array([0, 1, vocab - 1, 7], dtype=token_dtype(vocab))
    write_shard(tmp_path / "a.bin", tokens)
    assert np.array_equal(open_shard(tmp_path / "a.bin"), tokens)
    assert tokens.dtype.itemsize == (4 if vocab > 1 << 16 else 2)


def test_the_format_is_the_published_one(tmp_path):
    """Written by hand from its description: 256 int32, magic, version, count, then uint16."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, 5
    raw = header.tobytes() + np.array([5, 4, 3, 2, 50256], dtype=np.uint16).tobytes()
    (tmp_path / "fineweb_train_000001.bin").write_bytes(raw)
    assert open_shard(tmp_path / "fineweb_train_000001.bin").tolist() == [5, 4, 3, 2, 50256]
    write_shard(tmp_path / "ours.bin", np.array([5, 4, 3, 2, 50256], dtype="<u2"))
    assert (tmp_path / "ours.bin").read_bytes() == raw
    assert TokenDataset(tmp_path, "train", 2, 1).num_windows == 2


def test_bad_data_is_refused_with_its_name(tmp_path):
    with pytest.raises(DataError, match="not a folder"):
        TokenDataset(tmp_path / "nowhere", "train", 8, 1)
    with pytest.raises(DataError, match="holds: nothing"):
        TokenDataset(tmp_path, "train", 8, 1)
    folder = folder_of(tmp_path, 40, vocab=1000)
    with pytest.raises(DataError, match="too few"):
        TokenDataset(folder, "train", 64, 1)
    with pytest.raises(DataError, match="document"):
        TokenDataset(folder, "train", 8, 1, mask_document_ends=True)
    with pytest.raises(DataError, match="token 3"):
        TokenDataset(folder, "train", 8, 5, vocab=20).batch(0)
    (folder / "meta.json").write_text('{"vocab": 1000}')
    with pytest.raises(DataError, match="1000, but the model has 999"):
        TokenDataset(folder, "train", 8, 1, vocab=999)
    shard = folder / "any_train_000.bin"
    good = shard.read_bytes()
    for bad, message in (
        (good[:-1], "damaged"),
        (good + b"x", "damaged"),
        (b"\0" * len(good), "not a token shard"),
        (good[:100], "not a token shard"),
        (b"", "not a token shard"),
    ):
        shard.write_bytes(bad)
        with pytest.raises(DataError, match=message) as caught:
            TokenDataset(folder, "train", 8, 1)
        assert "any_train_000.bin" in str(caught.value)
    for meta in (b"[]", b'{"vocab": "many"}', b'{"end_of_document": null}', b"\xff"):
        (folder / "meta.json").write_bytes(meta)
        shard.write_bytes(good)
        with pytest.raises(DataError, match=r"meta\.json"):
            TokenDataset(folder, "train", 8, 1)


def test_no_shard_is_for_training_and_for_validation(tmp_path):
    folder = folder_of(tmp_path, 40)
    (folder / "any_train_000.bin").rename(folder / "retrieval_train_000.bin")
    for split in ("train", "valid"):
        with pytest.raises(DataError, match=r"retrieval_train_000\.bin is named like"):
            TokenDataset(folder, split, 8, 1)


def test_fingerprint_follows_the_content(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, 500, 500)
    paths = sorted(folder.glob("*.bin"))
    full = fingerprint(paths)
    assert full == fingerprint(paths)
    monkeypatch.setattr("slipstream.data.shards._FULL_HASH_BYTES", 10)
    sampled = fingerprint(paths)
    assert full != sampled
    write_shard(paths[1], np.zeros(500, dtype="<u2"))
    assert fingerprint(paths) != sampled


def test_prefetch_gives_groups_in_order_and_stays_bounded():
    loaded = []

    def load(group):
        loaded.append(group)
        return group * 10

    with Prefetch(load, start=5, depth=2) as ahead:
        deadline = time.monotonic() + 60
        while len(loaded) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert loaded == [5, 6, 7]  # two waiting, one in hand
        assert [ahead.get(g) for g in (5, 6, 7, 8)] == [50, 60, 70, 80]
        with pytest.raises(AssertionError, match="in order"):
            ahead.get(11)


def test_prefetch_raises_the_loaders_error_at_its_group_and_its_thread_ends():
    def load(group):
        if group == 2:
            raise DataError("shard gone")
        return group

    before = threading.active_count()
    ahead = Prefetch(load)
    assert [ahead.get(0), ahead.get(1)] == [0, 1]
    with pytest.raises(DataError, match="shard gone"):
        ahead.get(2)
    assert threading.active_count() == before

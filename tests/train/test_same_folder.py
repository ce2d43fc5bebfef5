"""Several machines need one run.dir: ranks that see another folder than the leader's are named, by everyone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.train.conftest import TINY, make_data

import warm
from slipstream.errors import UserError
from slipstream.train import same_folder
from slipstream.train.reporter import Position


class Shared:
    """A board between threads."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def post(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def wait(self, *keys, beat=None):
        with self.changed:
            assert self.changed.wait_for(lambda: all(key in self.values for key in keys), 120)
            return [self.values[key] for key in keys]


def looked(folders):
    """What each rank has to say, with a run.dir of its own."""
    board, positions = Shared(), [Position(rank, len(folders), 1, False) for rank in range(len(folders))]

    def look(position, folder):
        try:
            same_folder.require_one(board, position, folder, "word", 60.0)
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(look, positions, folders))


def test_one_folder_is_as_it_was_before(tmp_path):
    assert looked([tmp_path] * 3) == ["", "", ""]
    assert list(tmp_path.iterdir()) == []


def test_every_rank_hears_who_sees_another_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(same_folder, "PATIENCE_SECONDS", 0.2)
    own = tmp_path / "own"
    own.mkdir()
    said = looked([tmp_path, tmp_path, own])
    assert all("rank 2 on" in words and "rank 1 on" not in words for words in said), said
    assert "checkpoint.keep=0" in said[0]
    assert list(tmp_path.iterdir()) == [own]


def test_ranks_with_folders_of_their_own_do_not_begin(tmp_path):
    """Two ranks as torchrun starts them, each in a place of its own: the same words for run.dir, two folders."""
    data = make_data(tmp_path / "data")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = [*TINY, "run.dir=run", f"data.path={data}", "pipeline.stages=2", "train.steps=3"]
    ranks = []
    for rank in range(2):
        place = tmp_path / f"machine-{rank}"
        place.mkdir()
        torchruns = {
            "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }  # fmt: skip
        environment = {**os.environ, **{key: str(value) for key, value in torchruns.items()}}
        words = [sys.executable, "-m", "impatient", "train", *settings]
        ranks.append(
            warm.Popen(
                words, env=environment, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert all("rank 1 on" in words and "file system that all machines share" in words for words in said), (
        said
    )

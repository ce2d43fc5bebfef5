"""Under torchrun with --nnodes 1:2: a node is lost and comes back; the stages follow, the weights do not notice."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.train.conftest import TINY, Runs, assert_equal_weights

STEPS = ["train.steps=200", "checkpoint.every=10", "train.timeout_seconds=60"]


class Node:
    """One torchrun with one rank, as on a machine of its own."""

    def __init__(self, runs: Runs, port: int) -> None:
        settings = [
            *TINY, *STEPS, "pipeline.stages=2", "pipeline.elastic=true", "pipeline.cutover=2",
            f"run.dir={runs.folder / 'run'}", f"data.path={runs.data}",
        ]  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3",
            "--rdzv-backend=c10d", "--rdzv-id=elastic", f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-conf=last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3",
            "-m", "tests.train.held", str(runs.folder), *settings,
        ]  # fmt: skip
        # Without it torchrun's rank 0 does not tell a node that comes later where to meet (torch 2.13).
        apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment = {**os.environ, **apart, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._said = runs.folder / f"said-{time.monotonic_ns()}"
        with self._said.open("w") as said:
            self.process = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        return self._said.read_text()

    def lose(self) -> None:
        """As when a machine goes: torchrun and its rank at once."""
        pid = self.process.pid
        ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for number in (pid, *map(int, ranks)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.process.wait()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def wait_until(true, seconds: float = 250.0) -> None:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert true()


@pytest.mark.slow
def test_a_node_is_lost_and_comes_back(runs):
    runs.train("quiet", "pipeline.schedule=emulate", *STEPS, "pipeline.cutover=2")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def starts() -> list[int]:
        return [event["stages"] for event in runs.events("run", "start")]

    def two_stages_work() -> bool:
        events = runs.events("run")
        newest = max((at for at, event in enumerate(events) if event["event"] == "start"), default=0)
        steps = [event for event in events[newest:] if event["event"] == "step"]
        return starts()[-1:] == [2] and len(steps) > 20

    first, second = Node(runs, port), None
    try:
        wait_until(lambda: answers(port))  # the store of the rendezvous is the first node's, which stays
        second = Node(runs, port)
        wait_until(two_stages_work)
        second.lose()
        (runs.folder / "lost").touch()
        before = len(starts())
        wait_until(lambda: len(starts()) > before)
        assert starts()[-1] == 1, first.said
        second = Node(runs, port)
        first.process.wait(timeout=280)
        assert first.process.returncode == 0, first.said
        assert second.process.wait(timeout=60) == 0, second.said
    finally:
        for node in (first, second):
            if node is not None and node.process.poll() is None:
                node.lose()
    assert starts()[-1] == 2, (starts(), first.said)
    assert "2bw: P=1 stages," in first.said  # each start says what it is, not what was asked for
    assert runs.steps("run") == list(range(1, 201))
    assert_equal_weights(runs.weights("run"), runs.weights("quiet"))

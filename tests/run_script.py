"""A script as a user runs it: `python -m run_script FOLDER NAME ...` in a process that may be a fork; on ranks."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path


def run_ranks(folder, name: str, ranks: int = 2, given: tuple[str, ...] = ()) -> str:
    """What torchrun does for a script and what it is `given`; the output of all ranks."""
    # Its way to start a process: warm, where there is no GPU.
    launch = import_module("slipstream.distributed.launch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
    }
    processes = [
        launch.subprocess.Popen(
            [sys.executable, "-m", "run_script", str(folder), name, *given],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": ":".join(filter(None, sys.path))},
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    said = [process.communicate(timeout=850)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, said
    return "\n".join(said)


if __name__ == "__main__":
    folder, name = sys.argv[1:3]
    sys.argv[:3] = [name]
    sys.path.insert(0, folder)
    runpy.run_path(str(Path(folder) / f"{name}.py"), run_name="__main__")

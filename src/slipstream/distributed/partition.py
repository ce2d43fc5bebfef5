"""A GPU cut into equal parts, one for each rank: CUDA MPS with a share of the multiprocessors per process.

Processes that use one GPU otherwise take turns on the whole of it, and a pipeline's bubble is filled by its
neighbours. Under the Multi-Process Service they run at the same time, and `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` gives
each no more than its share of the multiprocessors, so a stage that waits leaves its part idle. Memory bandwidth, the
L2 cache and power remain shared. The service runs in a folder of its own and ends with the command; no setting of the
card is touched.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import UserError

CONTROL = "nvidia-cuda-mps-control"
_ANSWER_SECONDS = 20


@dataclass(frozen=True)
class Partitions:
    """A running service. A process started with `environment` owns 1/`count` of the GPU."""

    count: int
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 / self.count:g}",
        }

    def log(self) -> str:
        """The last lines the service wrote."""
        lines = []
        for path in sorted((self.folder / "log").glob("*.log")):
            lines += path.read_text(errors="replace").splitlines()[-6:]
        return "\n".join(lines)


@contextlib.contextmanager
def partitioned(count: int) -> Iterator[Partitions]:
    """Run the service while ranks use it; start them inside, and end them before it ends."""
    if count < 1:
        raise UserError(f"A GPU cannot be cut into {count} partitions.")
    with tempfile.TemporaryDirectory(prefix="slipstream-mps-", ignore_cleanup_errors=True) as folder:
        partitions = Partitions(count, Path(folder))
        for name in ("pipe", "log"):
            (partitions.folder / name).mkdir()
        _control(["-d"], partitions)
        try:
            yield partitions
        finally:
            with contextlib.suppress(UserError):
                _control([], partitions, said="quit\n")


def _control(arguments: list[str], partitions: Partitions, said: str | None = None) -> None:
    environment = {**os.environ, **partitions.environment}
    del environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]  # a share of each rank, not of the service
    # Files, not pipes: the service keeps what it inherits open, and reading a pipe to its end would wait for it.
    answer = partitions.folder / "answer"
    with answer.open("w") as out:
        try:
            done = subprocess.run(
                [CONTROL, *arguments], input=said or "", text=True, env=environment, stdout=out,
                stderr=subprocess.STDOUT, timeout=_ANSWER_SECONDS, check=False,
            )  # fmt: skip
        except FileNotFoundError:
            raise UserError(
                f"{CONTROL} is not on PATH, so the GPU cannot be cut into partitions. It comes with NVIDIA's "
                "driver (in a container: the 'compute' and 'utility' capabilities). Or run without partitions."
            ) from None
        except subprocess.TimeoutExpired:
            raise UserError(f"{CONTROL} {' '.join(arguments)} gave no answer.\n{partitions.log()}") from None
    if done.returncode:
        raise UserError(
            f"{CONTROL} {' '.join(arguments)} failed with code {done.returncode}: {answer.read_text().strip()}\n"
            f"{partitions.log()}"
        )

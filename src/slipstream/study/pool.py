"""The worker processes of a study, seen from the process that hands out runs.

Invariant: every point given to `start` comes back exactly once from `wait`, whether its run finished, failed,
was interrupted, or took its process down with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

from slipstream.study.sweep import Point
from slipstream.study.worker import Report, serve

PATIENCE_SECONDS = 20.0


@dataclass
class Worker:
    index: int
    process: BaseProcess
    connection: Connection
    point: Point | None = None
    began: float = 0.0


class Pool:
    """`size` workers, started when first needed and replaced when one breaks."""

    def __init__(self, size: int, out: Path) -> None:
        self._size, self._out = size, out
        self._context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._stopped = self._context.Event()
        self._workers: list[Worker] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:  # all leave at once: a process with a GPU takes its time
            with contextlib.suppress(OSError):
                worker.connection.send(None)
        for worker in self._workers:
            self._dismiss(worker)

    @property
    def active(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.point is not None]

    @property
    def idle(self) -> bool:
        return len(self.active) < self._size

    def prepare(self, count: int) -> None:
        """Start processes now that will be needed: they import while the first runs are set up."""
        while len(self._workers) < min(count, self._size):
            self._hire()

    def start(self, point: Point, folder: Path) -> None:
        """Give the run to an idle worker."""
        tree = point.config.model_dump()
        tree["run"]["dir"] = str(folder)
        while True:
            worker = next((w for w in self._workers if w.point is None), None) or self._hire()
            try:
                worker.connection.send(tree)
                break
            except OSError:  # it died while it had nothing to do
                self._dismiss(worker)
                self._workers.remove(worker)
        worker.point, worker.began = point, time.monotonic()

    def wait(self, timeout_seconds: float) -> list[tuple[Point, Report]]:
        """Runs that ended, waiting at most so long for the first."""
        sources = {worker.connection: worker for worker in self.active}
        if not sources:
            return []
        ended = []
        for connection in wait(list(sources), timeout_seconds):
            worker = sources[cast(Connection, connection)]
            point, worker.point = worker.point, None
            assert point is not None
            try:
                report: Report = worker.connection.recv()
            except (EOFError, OSError):
                worker.process.join(PATIENCE_SECONDS)
                message = f"its process died with exit code {worker.process.exitcode}"
                report = Report(message, "", True, time.monotonic() - worker.began)
            if report.broken:
                self._dismiss(worker)
                self._workers.remove(worker)
            ended.append((point, report))
        return ended

    def interrupt(self) -> None:
        """Pass a Ctrl-C on: it reaches the workers by itself only where all were started from a terminal.

        One that is still starting may ignore the signal, as what runs in the background does; the event it sees.
        """
        self._stopped.set()
        for worker in self.active:
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGINT)

    def _hire(self) -> Worker:
        index = min(set(range(self._size)) - {worker.index for worker in self._workers})
        ours, theirs = self._context.Pipe()
        log = str(self._out / f"worker-{index}.log")
        threads = max(1, (os.cpu_count() or 1) // self._size)
        process = self._context.Process(
            target=serve, args=(theirs, log, os.getpid(), threads, self._stopped), daemon=True
        )
        process.start()
        theirs.close()
        worker = Worker(index, process, ours)
        self._workers.append(worker)
        return worker

    def _dismiss(self, worker: Worker) -> None:
        """A worker without a run leaves by itself; one with a run is stopped."""
        with contextlib.suppress(OSError):
            worker.connection.send(None)
        if worker.point is not None:
            worker.process.terminate()
        worker.process.join(PATIENCE_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()

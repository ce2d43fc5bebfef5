"""One worker process of a study: many runs, one after another, in one warm process.

Importing torch and compiling a model take longer than a small run, so a worker lives as long as the study and
compiled code is used again wherever shapes are equal. Invariant: a worker reports every run it was given,
or dies; the run folder alone says what came of it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from shutil import rmtree
from typing import Any

PARENT_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Report:
    """What became of a run: "" is success; `broken`: the process must not be used again."""

    message: str
    trace: str
    broken: bool
    seconds: float = 0.0
    elsewhere: bool = False  # not begun: another process is at it
    disk: bool = False  # not to be written: nor is the next


def serve(connection: Connection, log: str, parent: int, compile_threads: int, stopped: Event) -> None:
    """Take configs (as trees) from the connection until it gives None; everything printed goes to `log`.

    `stopped` is set before the SIGINT that ends a run, which may come before it can be caught.
    """
    _print_to(log)
    _die_with(parent)
    interrupt = _Interrupt()
    signal.signal(signal.SIGINT, interrupt)  # never ignored: what is ignored here the trainer ignores too
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compile_threads))
    import slipstream.train.session  # noqa: F401  now, while the first run is still being chosen

    shape: Any = None
    while (tree := connection.recv()) is not None:
        began = time.perf_counter()
        if shape is not None and shape != shape_of(tree):
            _forget_compiled()  # torch gives up compiling a function that keeps meeting new shapes
        shape = shape_of(tree)
        print(f"--- {tree['run']['dir']}", flush=True)
        try:
            interrupt.armed = True
            report = Report("", "", broken=True) if interrupt.asked or stopped.is_set() else _run(tree)
            interrupt.armed = False
        except KeyboardInterrupt:
            report = Report("", "", broken=True)
        connection.send(replace(report, seconds=time.perf_counter() - began))
        if report.broken:
            return


class _Interrupt:
    """Ctrl-C outside the trainer, which catches it while it trains: a run that is being set up ends there."""

    asked = armed = False

    def __call__(self, *_: object) -> None:
        self.asked = True
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


def _run(tree: dict[str, Any]) -> Report:
    """Train one run; after anything but a mistake of the user's this process may be spoilt."""
    from slipstream.config import from_tree
    from slipstream.errors import DiskError, InUseError, UserError
    from slipstream.train.start import start

    try:
        start(from_tree(tree))
    except InUseError as error:
        return Report(str(error), "", broken=False, elsewhere=True)
    except DiskError as error:
        return Report(str(error), "", broken=False, disk=True)
    except UserError as error:
        return Report(str(error), "", broken=False)
    except Exception as error:  # a failed run must not end the study; a CUDA error outlives its run
        trace = traceback.format_exc()
        print(trace, flush=True)
        return Report(f"{type(error).__name__}: {error}", trace, broken=True)
    finally:
        _clean(Path(tree["run"]["dir"]), keep=bool(tree["checkpoint"]["keep"]))
    return Report("", "", broken=False)


def _clean(folder: Path, keep: bool) -> None:
    """A study keeps numbers, not weights, unless it asks for them; a run that was interrupted keeps them to go on."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    from slipstream.metrics.events import read_run

    if keep:
        return
    (folder / "tokenizer.json").unlink(missing_ok=True)
    kept = folder / "checkpoints"  # which an earlier version left
    if kept.exists() and read_run(folder).status == "finished":
        rmtree(kept, ignore_errors=True)


def shape_of(tree: dict[str, Any]) -> Any:
    """What compiled code depends on."""
    pipeline, train = tree["pipeline"], tree["train"]
    return (
        tree["model"],
        tree["data"]["sequence"],
        pipeline["microbatch_size"],
        pipeline["delay"] if isinstance(pipeline["delay"], list) else None,
        pipeline["cutover"] if train["fuse"] or isinstance(pipeline["cutover"], list) else None,
        pipeline["microbatches"] if train["fuse"] else None,
        *(train[key] for key in ("dtype", "compile", "fp8", "deterministic", "attention", "chunked_loss")),
    )


def _forget_compiled() -> None:
    import torch

    torch.compiler.reset()


def _print_to(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _die_with(parent: int) -> None:
    """Leave when the process that started this one is gone, even in the middle of a run."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()

"""From a config to a run: refuse what cannot work, say what will happen, start the ranks. Imports no torch itself.

A run ends "finished", or "signal": stopped on request and saved.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shlex
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from slipstream.config import Config
from slipstream.distributed import RankPool, cores, forwarded_signals, partitioned, started_by_torchrun
from slipstream.distributed.answers import STACKS
from slipstream.errors import StoppedError, UserError
from slipstream.metrics.progress import unbroken_console
from slipstream.train import cutovers, preflight
from slipstream.train.banner import banner
from slipstream.train.elastic import fitted, supervise
from slipstream.train.sources import data_folder


def start(config: Config) -> str:
    """Train; how it ended. In this process (emulate), as one of torchrun's ranks, or on ranks started here."""
    command = own_command()
    faulthandler.enable(file=2)
    # Of this process, wherever stderr points; ranks get it from the launcher.
    faulthandler.register(STACKS, file=2)
    if started_by_torchrun() and config.pipeline.schedule != "emulate":
        return _under_torchrun(config, command)
    config = preflight.prepare(config)
    preflight.check(config)
    say = (lambda text: None) if config.train.quiet else _say
    say(banner(cutovers.expected(config)))
    once = cache(say)
    data_folder(
        config,
        lambda *_: once("Tokenising Python's standard library, once; it is kept in ~/.cache/slipstream ..."),
    )
    asked = Words(config)
    if config.pipeline.schedule == "emulate":
        say("Importing torch ...")
        from slipstream.train.session import run_rank

        try:
            return run_rank(None, config.model_dump(), command, asked)["reason"]
        except KeyboardInterrupt:
            asked.second()
            raise StoppedError("Stopped at once.") from None
    nproc = config.ranks
    with ExitStack() as stack:
        environment = cores.environment(config.train.device)
        if config.pipeline.partitions:
            from slipstream.train import build

            if build.device(config).type != "cuda":
                raise UserError(
                    "pipeline.partitions cuts a GPU, and torch sees none. Set pipeline.partitions=false."
                )
            environment = stack.enter_context(partitioned(nproc)).environment
        say(f"Starting {nproc} process{'es' * (nproc > 1)}; importing torch takes them a few seconds ...")
        pool = stack.enter_context(RankPool(nproc, environment))
        stop = stack.enter_context(forwarded_signals(pool, asked))
        return supervise(pool, stop, config, command, _say)


def _under_torchrun(config: Config, command: str) -> str:
    if config.pipeline.partitions:
        raise UserError("pipeline.partitions needs ranks that slipstream starts itself. Drop torchrun.")
    from slipstream.distributed.world import initialise
    from slipstream.train.session import run_rank

    os.environ.update(cores.environment(config.train.device))  # before anything of torch looks for a GPU
    ranks = int(os.environ["WORLD_SIZE"])
    config = preflight.prepare(config, world=ranks)
    now = fitted(config, ranks)  # an elastic run may have fewer stages at the moment
    with initialise(used=now.ranks, timeout_seconds=config.train.timeout_seconds) as world:
        if world.spare:
            world.wait_until_over()
            return "finished"
        if world.rank == 0 and not config.train.quiet:
            _say(banner(fitted(cutovers.expected(config), ranks)))
        asked = Words(config) if world.rank == 0 else None
        return run_rank(world, config.model_dump(), command, asked)["reason"]


class Words:
    """What the person who asks a run to stop is told, at once. Written past all buffers: a signal comes at any time."""

    def __init__(self, config: Config) -> None:
        self._folder, self._saves = Path(config.run.dir), config.checkpoint.keep > 0

    def first(self) -> None:
        does = "then saves" if self._saves else "but saves nothing (checkpoint.keep = 0)"
        self._tell(
            f"Stopping: the run finishes the updates under way, {does}. Ctrl-C again ends it at once, without saving."
        )

    def second(self) -> None:
        steps = sorted(path.name for path in (self._folder / "checkpoints").glob("step-*"))
        kept = f"The newest checkpoint is of step {int(steps[-1][5:])}" if steps else "There is no checkpoint"
        goes = "the same command goes on from there" if steps else "the same command begins again"
        self._tell(f"Stopped at once: nothing more was saved. {kept}; {goes}.")

    @staticmethod
    def _tell(text: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(2, f"{chr(10) * os.isatty(2)}{text}\n".encode())


def _say(text: str) -> None:
    unbroken_console().print(text, soft_wrap=True, markup=False)


def own_command() -> str:
    """The command as it was typed."""
    own = Path(sys.argv[0]).name in ("slipstream", "__main__.py")
    return shlex.join(["slipstream", *sys.argv[1:]] if own else sys.argv)

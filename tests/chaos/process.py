"""A process of a case: `python -m chaos.process SPEC.json`. It is `slipstream train` with the job of `inside.py`.

With "rank" in the specification it is one rank, as torchrun starts them, in the network namespace that is named there.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from chaos import inside
from slipstream import cli
from slipstream.distributed import RankPool
from slipstream.train import session

GRACE_SECONDS = 2.0  # of ten: what the others saw of a lost rank they say at once, or not at all


def main(path: str) -> None:
    spec = inside.read(path)
    if "namespace" in spec:
        enter(spec["namespace"])
    os.environ.update(spec.get("environment", {}))
    sys.modules["slipstream.distributed.answers"].GRACE_SECONDS = GRACE_SECONDS
    if "rank" in spec:
        usual = session.run_rank

        def run_rank(world, *args, **options):
            session.run_rank = usual
            return inside.perform(world, spec, *args, **options)

        session.run_rank = run_rank
    else:
        (Path(spec["place"]) / "launcher").write_text(str(os.getpid()))
        usual = RankPool.run
        RankPool.run = lambda pool, job, *args, **options: usual(pool, inside.perform, spec, *args, **options)
    sys.argv = ["slipstream", "train", *spec["arguments"]]
    cli.main()


def enter(namespace: str) -> None:
    """This thread, and every one that it starts, in a network namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


if __name__ == "__main__":
    main(sys.argv[1])

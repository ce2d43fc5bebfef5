"""Is each partition of the GPU really its own? Matrix products and copies of one partition, alone and together.

whole     one process on the whole GPU, before it is cut
alone     one partition works; the others have a context and nothing to do
waiting   one partition works; the streams of the others wait for it, as a stage waits for its neighbour
together  all partitions work: about `whole` in sum, and one gets the same as `alone`, if partitions hold
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slipstream.bench.checks import check_device, make_room
from slipstream.bench.contenders import Stopwatch
from slipstream.distributed import RankPool, World, partitioned
from slipstream.distributed.cores import environment
from slipstream.distributed.world import device_for
from slipstream.errors import UserError

SIZE = 8192  # of the square bfloat16 matrices
COPY_BYTES = 1 << 30
TIMEOUT_SECONDS = 60.0


@contextlib.contextmanager
def ranks_on(count: int, partitions: int | None = None, device: str = "cuda") -> Iterator[RankPool]:
    """A pool of ranks for a device; on the partitions of a GPU where it is cut."""
    if partitions is None:
        with RankPool(count, environment(device)) as pool:
            yield pool
        return
    with partitioned(partitions) as service:
        try:
            with RankPool(count, service.environment) as pool:
                yield pool
        except UserError as error:
            raise UserError(f"{error}\nThe partitions' service said:\n{service.log()}") from error


def run(partitions: int, as_json: bool, out: Path | None) -> None:
    """`slipstream bench --probe`."""
    if partitions < 1:
        raise UserError(f"A GPU cannot be cut into {partitions} partitions. Set --partitions to 1 or more.")
    check_device("cuda")
    make_room(out)
    found = probe(partitions)
    text = json.dumps(found, indent=2)
    if out is not None:
        out.write_text(text + "\n")
    print(text) if as_json else _print(Console(highlight=False), found)


def probe(count: int, products: int = 200) -> dict[str, Any]:
    """Measure and return everything, rates in TFLOP/s and GB/s; `products` matrix products a measurement."""
    with ranks_on(1) as pool:
        (whole,) = pool.run(measure_whole, products * 3, timeout=TIMEOUT_SECONDS)
    with ranks_on(count, count) as pool:
        ranks = pool.run(measure_partition, products, timeout=TIMEOUT_SECONDS)
    alone, waiting = ranks[0]["alone"], ranks[0]["waiting"]
    together = [rank["together"] for rank in ranks]
    share = sum(together) / len(together)
    return {
        "partitions": count,
        "device": whole["device"],
        "backend": ranks[0]["backend"],
        "multiprocessors": {"whole": whole["multiprocessors"], "partition": ranks[0]["multiprocessors"]},
        "matmul_tflops": {
            "whole": whole["matmul"],
            "alone": alone,
            "alone_others_waiting": waiting,
            "together": together,
            "together_sum": sum(together),
        },
        "alone_of_whole": alone / whole["matmul"],
        "together_of_whole": sum(together) / whole["matmul"],
        "waiting_over_alone": waiting / alone,
        "together_over_alone": share / alone,
        "copy_gbytes_per_second": {
            "whole": whole["copy"],
            "alone": ranks[0]["copy_alone"],
            "together": [rank["copy_together"] for rank in ranks],
        },
    }


def measure_whole(world: World, products: int) -> dict[str, Any]:
    device = device_for(world.rank)
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "matmul": matmul_tflops(device, products),
        "copy": copy_gbytes(device),
    }


def measure_partition(world: World, products: int) -> dict[str, Any]:
    """One rank of the partitioned GPU; rank 0 is the one that works alone."""
    if not torch.cuda.is_available():
        raise UserError("A rank of the partitioned GPU sees no device.")
    device = device_for(world.rank)
    found: dict[str, Any] = {
        "backend": dist.get_backend(),
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count,
    }
    matmul_tflops(device, 5)  # everybody has its context and its libraries
    signal = torch.zeros(1, device=device)
    for name in ("alone", "waiting"):
        torch.cuda.synchronize(device)
        dist.barrier()
        if world.rank == 0:
            found[name] = matmul_tflops(device, products, signal if name == "waiting" else None)
        elif name == "waiting":
            # Told as soon as rank 0 has queued its work; the stream waits until it is done.
            dist.recv(signal, 0)
            torch.cuda.synchronize(device)
    dist.barrier()
    if world.rank == 0:
        found["copy_alone"] = copy_gbytes(device)
    for name, rate in (
        ("together", lambda: matmul_tflops(device, products)),
        ("copy_together", lambda: copy_gbytes(device)),
    ):
        torch.cuda.synchronize(device)
        dist.barrier()
        found[name] = rate()
    return found


def matmul_tflops(device: torch.device, products: int, signal: torch.Tensor | None = None) -> float:
    """Matrix products queued at once; `signal` is sent to all others behind them."""
    left, right = (torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    torch.matmul(left, right, out=out)
    torch.cuda.synchronize(device)
    watch = Stopwatch(device)
    watch.mark()
    for _ in range(products):
        torch.matmul(left, right, out=out)
    watch.mark()
    if signal is not None:
        for rank in range(1, dist.get_world_size()):
            dist.send(signal, rank)
    start, end = watch.read()
    return products * 2 * SIZE**3 / (end - start) / 1e12


def copy_gbytes(device: torch.device, copies: int = 30) -> float:
    """Bytes read and written by copies inside the device's memory."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize(device)
    watch = Stopwatch(device)
    watch.mark()
    for _ in range(copies):
        target.copy_(source)
    watch.mark()
    start, end = watch.read()
    return copies * 2 * COPY_BYTES / (end - start) / 1e9


def _print(console: Console, found: dict[str, Any]) -> None:
    """What the partitions of a GPU get, alone and together."""
    matmul, copied, processors = (
        found[name] for name in ("matmul_tflops", "copy_gbytes_per_second", "multiprocessors")
    )
    table = Table(title=f"{found['device']} in {found['partitions']} partitions", box=SIMPLE_HEAD)
    for heading in ("", "multiprocessors", "matmul TFLOP/s", "copy GB/s"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, count, products, copies in (
        ("whole GPU", processors["whole"], [matmul["whole"]], [copied["whole"]]),
        ("one, others idle", processors["partition"], [matmul["alone"]], [copied["alone"]]),
        ("one, others waiting", "", [matmul["alone_others_waiting"]], []),
        ("all together", "", matmul["together"], copied["together"]),
    ):
        table.add_row(
            name, str(count), *(" ".join(f"{v:.0f}" for v in rates) for rates in (products, copies))
        )
    console.print(table)
    console.print(
        f"one is {found['alone_of_whole']:.2f} of the whole, all together {found['together_of_whole']:.2f}; "
        f"with the others at work one gets {found['together_over_alone']:.2f} of what it gets alone."
    )

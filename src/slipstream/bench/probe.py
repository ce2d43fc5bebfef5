"""Is each partition of the GPU really its own? Matrix products and copies of one partition, alone and together.

    whole     one process on the whole GPU, before it is cut
    alone     one partition works; the others have a context and nothing to do
    waiting   one partition works; the streams of the others wait for it, as a stage waits for its neighbour
    together  all partitions work

If partitions hold, `together` adds up to about `whole`, and one partition gets the same whether the others work, wait
or rest: an idle partition does not speed up the others. What `alone` has beyond its share is lent by idle neighbours
(power, so clocks). Bandwidth is shared, and the copies show how much of it one partition can take.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from slipstream.bench.stopwatch import Stopwatch
from slipstream.distributed import RankPool, World, partitioned
from slipstream.distributed.world import device_for
from slipstream.errors import UserError

SIZE = 8192  # of the square bfloat16 matrices
COPY_BYTES = 1 << 30
TIMEOUT_SECONDS = 60.0


def probe(count: int, products: int = 200) -> dict[str, Any]:
    """Measure and return everything, rates in TFLOP/s and GB/s; `products` matrix products a measurement."""
    with RankPool(1) as pool:
        (whole,) = pool.run(measure_whole, products * 3, timeout=TIMEOUT_SECONDS)
    with partitioned(count) as partitions:
        try:
            with RankPool(count, partitions.environment) as pool:
                ranks = pool.run(measure_partition, products, timeout=TIMEOUT_SECONDS)
        except UserError as error:
            raise UserError(f"{error}\n{partitions.log()}") from error
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
            dist.recv(
                signal, 0
            )  # told as soon as rank 0 has queued its work; the stream waits until it is done
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
    watch.read()
    start, end = watch.moments
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
    watch.read()
    start, end = watch.moments
    return copies * 2 * COPY_BYTES / (end - start) / 1e9

"""Joins models, optimizers and ranks to `plan.profile`, which may not import them: what `plan --profile`
times.
"""

from __future__ import annotations

import os

from slipstream.models.sizes import ModelConfig
from slipstream.plan.profile import SIZES, Measured, Profile, link, ping_pong, time_stage, timing


def device_title() -> str:
    """What the device that would be timed is called."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu, one core"


def measure_profile(config: ModelConfig, sequence: int, optimizer: str) -> Profile:
    """Time the parts of `config` on this machine's device, and the link between two of its processes."""
    import torch
    from torch.nn import functional

    from slipstream.bench.contenders import BASELINE, ENGINE
    from slipstream.bench.profile import measure_runtime
    from slipstream.bench.work import Work
    from slipstream.distributed import RankPool
    from slipstream.models.stages import build_stage
    from slipstream.optim import build

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cpu":
        torch.set_num_threads(1)  # as every rank of a run
    last = config.layers
    parts = {
        "embedding": build_stage(config, 0, 0, embedding=True, head=False, seed=0, device=device),
        "layer": build_stage(config, 0, 1, embedding=False, head=False, seed=0, device=device),
        "head": build_stage(config, last, last, embedding=False, head=True, seed=0, device=device),
    }

    def loss(logits: torch.Tensor) -> torch.Tensor:
        targets = torch.zeros(logits.shape[:-1], dtype=torch.long, device=device)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    timings = {}
    for name, stage in parts.items():
        stage.to(dtype)
        steps = build(optimizer, stage)
        seconds = {}

        def update(steps: torch.optim.Optimizer = steps) -> None:
            steps.step()
            steps.zero_grad()

        for size in SIZES:
            if name == "embedding":
                inputs = torch.zeros(size, sequence, dtype=torch.long, device=device)
            else:
                inputs = torch.randn(size, sequence, config.dim, device=device, dtype=dtype)
            seconds[size] = time_stage(stage, inputs, update, loss if name == "head" else None)
        timings[name] = timing(seconds)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        memory = pages * size / (os.cpu_count() or 1)
    measured = Measured.of(config, sequence, optimizer)
    with RankPool(2) as pool:
        found = link(pool.run(ping_pong)[0])
        if device.type == "cuda":  # the host runs ahead of the device: what it does costs nothing
            return Profile(measured, device_title(), float(memory), timings, found)
        work = Work(batch=1, tokens=sequence, dim=config.dim)
        runtimes = [measure_runtime(pool, name, work, found) for name in (ENGINE, BASELINE)]
    return Profile(measured, device_title(), float(memory), timings, found, *runtimes)

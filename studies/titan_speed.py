"""torchtitan's own pipelines and 2BW under torchtitan, in turns: seconds per step of one Llama, on four stages.

    PYTHONPATH=src:tests/titan python studies/titan_speed.py OUT [--rounds 3] [--only 1F1B,2bw] [--compile]

On a GPU the stages have a partition of it each (CUDA MPS, over an NCCL that lets ranks share one: docs/engine.md);
without one they are processes on cores, and a tiny model. Every turn builds a trainer and trains it for some steps; the
first and the last are not counted. Writes OUT/turns.jsonl, a line a turn, and prints medians. The head is small, so
that stages are equal and what is compared is the schedules. Needs torch 2.14 (docs/torchtitan.md).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from slipstream.distributed import partitioned

STAGES = 4
CONTENDERS = {  # torchtitan's name of a schedule, and chunks on each rank
    "1F1B": ("1F1B", 1),
    "Interleaved1F1B": ("Interleaved1F1B", 2),
    "ZBV": ("ZBVZeroBubble", 2),
    "2bw": ("1F1B", 1),
}
WARM, COUNTED, AFTER = 4, 20, 2
SECONDS = 240.0  # of one turn


def shape(on_gpu: bool) -> dict[str, int]:
    if on_gpu:
        return {"dim": 1024, "heads": 16, "layers": 16, "ffn": 2816, "length": 1024, "rows": 16}
    return {"dim": 32, "heads": 2, "layers": 8, "ffn": 64, "length": 16, "rows": 1}


def turn(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One rank of one contender, from building its trainer to closing it."""
    import on_cpu  # first: it patches what torchtitan reads when it is imported
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import _build_llama3_layers

    from slipstream.torchtitan import with_2bw

    on_gpu, microbatches = torch.cuda.is_available(), given.microbatches
    cutover, in_flight = given.cutover, given.in_flight
    sizes = shape(on_gpu) | json.loads(given.shape)
    on_cpu.LENGTH = sizes["length"]
    config = on_cpu.debug_config(given.out / "work")
    config.compile.enable = given.compile
    model, dim = config.model_spec.model, sizes["dim"]
    model.dim = model.tok_embeddings.embedding_dim = model.lm_head.in_features = dim
    model.norm.normalized_shape = dim
    rope = ComplexRoPE.Config(dim=dim // sizes["heads"], max_seq_len=sizes["length"], theta=500000)
    model.layers = _build_llama3_layers(
        n_layers=sizes["layers"], dim=dim, n_heads=sizes["heads"], hidden_dim=sizes["ffn"], rope=rope,
        attn_backend="flex",
    )  # fmt: skip
    for layer in model.layers:
        layer.attention.inner_attention = (
            ScaledDotProductAttention.Config()
        )  # flex attention has to be compiled
    schedule, chunks = CONTENDERS[name]
    rows = microbatches * sizes["rows"]
    given = {
        "training.steps": WARM + COUNTED + AFTER,
        "training.seq_len": sizes["length"],
        "training.local_batch_size": rows,
        "training.global_batch_size": rows,
        "training.mixed_precision_param": "bfloat16" if on_gpu else "float32",
        "optimizer.implementation": "fused" if on_gpu else "foreach",
        "parallelism.pipeline_parallel_degree": given.stages,
        "parallelism.pipeline_parallel_microbatch_size": sizes["rows"],
        "parallelism.pipeline_parallel_schedule": schedule,
        "parallelism.pipeline_parallel_layers_per_stage": sizes["layers"] // (given.stages * chunks),
        "parallelism.pipeline_parallel_first_stage_less_layers": 0,
        "parallelism.pipeline_parallel_last_stage_less_layers": 0,
    }
    if name == "2bw":
        config = with_2bw(config)
        config.slipstream.cutover, config.slipstream.in_flight = cutover, in_flight
    on_cpu.change(config, given)
    trainer = config.build()
    marks: list[float] = []
    step = trainer.train_step

    def timed(*args: Any, **kwargs: Any) -> Any:
        if len(marks) in (WARM, WARM + COUNTED) and on_gpu:
            torch.cuda.synchronize()  # 2BW is in the middle of a step at both
        marks.append(time.perf_counter())
        return step(*args, **kwargs)

    trainer.train_step = timed
    try:
        with mock.patch("torchtitan.trainer.time.sleep"):  # rank 0 would wait two seconds at the end
            trainer.train()
        seconds = (marks[WARM + COUNTED] - marks[WARM]) / COUNTED
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()
    tokens = rows * sizes["length"]
    return {
        "contender": name,
        "microbatches": microbatches,
        "seconds": seconds,
        "tokens": tokens,
    }


def rank(given: argparse.Namespace) -> None:
    """One turn in a process of its own: torchtitan's state is the process's."""
    faulthandler.dump_traceback_later(SECONDS - 20, exit=True)
    if torch.cuda.is_available() and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        os.environ["LOCAL_RANK"] = "0"  # ranks that share a GPU
    found = turn(given.turn, given)
    if os.environ["RANK"] == "0":
        with (given.out / "turns.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")


def start(name: str, given: argparse.Namespace, surroundings: dict[str, str]) -> bool:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={given.stages}",
    ]
    command = [*launcher, __file__, str(given.out), "--turn", name, "--microbatches", str(given.microbatches)]
    command += ["--stages", str(given.stages), "--shape", given.shape, *["--compile"] * given.compile]
    command += [] if given.cutover is None else ["--cutover", str(given.cutover)]
    command += [] if given.in_flight is None else ["--in-flight", str(given.in_flight)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    environment = {**os.environ, **surroundings, "TITAN_DEVICE": device, "OMP_NUM_THREADS": "1"}
    with (given.out / f"{name}.log").open("a") as log:
        try:
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--stages", type=int, default=STAGES)
    parser.add_argument("--microbatches", type=int, help="of a step; else two for each stage")
    parser.add_argument("--cutover", type=int, help="of 2BW; else its default")
    parser.add_argument("--in-flight", type=int, help="of 2BW; else measured")
    parser.add_argument("--shape", default="{}", help='changes of it, as JSON: {"layers": 8}')
    parser.add_argument("--compile", action="store_true", help="every layer, as torchtitan does")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--turn", choices=CONTENDERS, help="as a rank, of this contender")
    given = parser.parse_args()
    given.microbatches = given.microbatches or 2 * given.stages
    if unknown := set(given.only.split(",")) - set(CONTENDERS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(CONTENDERS)}")
    try:
        changes = json.loads(given.shape)
        unknown = set(changes) - set(shape(True))
    except (ValueError, TypeError):
        parser.error(f"""--shape {given.shape!r} is no JSON object, such as {'{"layers": 8}'}""")
    if unknown:
        parser.error(f"--shape: {', '.join(sorted(unknown))} is none of {', '.join(shape(True))}")
    if given.turn:
        rank(given)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    service = partitioned(given.stages) if torch.cuda.is_available() else nullcontext()
    with service as made:
        surroundings = {} if made is None else made.environment
        for number in range(given.rounds):
            for name in given.only.split(","):
                ended = start(name, given, surroundings)
                print(f"round {number + 1}, {name}: {'done' if ended else 'failed, see its log'}", flush=True)
    if not (given.out / "turns.jsonl").exists():
        sys.exit(f"No turn ended well. The logs are in {given.out}.")
    lines = [json.loads(line) for line in (given.out / "turns.jsonl").read_text().splitlines()]
    medians = {
        name: statistics.median(line["seconds"] for line in lines if line["contender"] == name)
        for name in dict.fromkeys(line["contender"] for line in lines)
    }
    ours = medians.get("2bw")
    for name, seconds in sorted(medians.items(), key=lambda pair: pair[1]):
        over = f", {seconds / ours:.2f} of 2bw's" if ours else ""
        print(f"{name}: {1000 * seconds:.1f} ms a step, {lines[0]['tokens'] / seconds:,.0f} tokens/s{over}")


if __name__ == "__main__":
    main()

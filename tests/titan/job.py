"""Training runs of torchtitan, one after the other: `job.py FILE`, a JSON list of

{"kind": "stock" | "2bw" | "seed" | "emulated", "ranks": ..., "folder": ..., "config": {dotted name: value},
 "settings": {those of with_2bw}, "recompute": whether activations are, "model": llama3 or qwen3,
 "unwaiting": whether a step may not wait for the GPU}

The ranks of a run are forked from this process, which has imported torch and torchtitan: that takes longer than a run.
Under torchrun (on GPUs, which do not survive a fork) this process is a rank.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import on_cpu  # isort: skip  (first: it patches what torchtitan reads when it is imported)
import emulated
import torch
from torch.distributed import TCPStore
from torchtitan.distributed.activation_checkpoint import FullAC

from slipstream.torchtitan import with_2bw


def train(kind, folder, config, settings=None, recompute=False, model="llama3", unwaiting=False, **more):
    if kind == "emulated":
        emulated.train(folder, config, settings or {}, model, **more)
        return
    made = on_cpu.debug_config(folder, model)
    if recompute:
        made.activation_checkpoint = FullAC.Config()
    if kind == "2bw":
        made = with_2bw(made, **(settings or {}))
    on_cpu.change(made, config)
    trainer = made.build()
    try:
        if kind == "seed":
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            record = on_cpu.Record(trainer, f"{folder}/record")
            if unwaiting:
                refuse_waits(trainer)
            trainer.train()
            record.write()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


def refuse_waits(trainer):
    """From the third step on, whatever makes the host wait for the GPU is an error."""
    step = trainer.train_step

    def refusing(batches):
        torch.cuda.set_sync_debug_mode("error" if trainer.step > 2 else "default")
        try:
            step(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer.train_step = refusing


def rank(index, ranks, port, job):
    """In a forked process, which never returns."""
    place = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    status = 1
    try:
        train(**job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def run(ranks, **job):
    """Whether every rank ended well. When one fails the others are ended."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = {}
    for index in range(ranks):
        child = os.fork()
        if child == 0:
            rank(index, ranks, store.port, job)
        children[child] = index
    failed = False
    while children:
        child, status = os.wait()
        if children.pop(child, None) is not None and status and not failed:
            failed = True
            for other in children:
                os.kill(other, 15)
    return not failed


if __name__ == "__main__":
    for each in json.loads(Path(sys.argv[1]).read_text()):
        if "RANK" in os.environ:
            if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
                os.environ["LOCAL_RANK"] = "0"  # ranks that share a GPU
            each.pop("ranks")
            train(**each)
        elif not run(**each):
            sys.exit(f"{each['kind']} in {each['folder']} failed")

"""What torchtitan on 2BW must equal: its model, optimizer and learning rates on our emulator, in one process."""

import json
from pathlib import Path

import cpu_device
import on_cpu
import torch
import torch.distributed.checkpoint as dcp

from slipstream import Emulator
from slipstream.torchtitan.optimizers import Optimizers2BW, only


def train(folder, config, settings, model="llama3", data_ranks=1):
    """As many rows make a microbatch as there are data ranks, each of which has one of them."""
    kept = {k: v for k, v in config.items() if not k.startswith("parallelism")}
    made = on_cpu.debug_config(folder, model, **kept)
    made.model_spec.model.update_from_config(config=made)
    module = made.model_spec.model.build()
    module.init_weights(buffer_device=None)
    weights = module.state_dict()
    dcp.load(weights, checkpoint_id=made.checkpoint.initial_load_path, no_dist=True)
    module.load_state_dict(weights)
    device = "cpu" if cpu_device.ON_CPU else "cuda"
    module.to(device)
    settings = dict(settings)
    if "optimizer" in settings:
        name = settings.pop("optimizer")
        container = Optimizers2BW(
            Optimizers2BW.Config(name=name, options={"lr": settings.pop("lr")}), model_parts=[module]
        )
    else:
        container = made.optimizer.build(model_parts=[module])
    rates = made.lr_scheduler.build(optimizers=container, training_steps=made.training.steps)
    rows = made.training.global_batch_size
    tokens = torch.tensor(rows * on_cpu.LENGTH, device=device)
    loss_fn = made.loss.build(compile_config=made.compile)
    emulator = Emulator(
        module,
        rows // data_ranks,
        lambda output, target: loss_fn(output, target, tokens)[0],
        lambda module: only(container),
        max_grad_norm=made.training.max_norm,
        scale_grads=False,
        **settings,
    )
    steps = {}
    for step in range(made.training.steps):
        found = torch.stack([on_cpu.row(step * rows + index) for index in range(rows)]).to(device)
        losses = emulator.step(found[:, :-1].contiguous(), found[:, 1:].contiguous())
        rates.step()
        steps[step + 1] = {"loss": torch.stack(losses).sum().item()}
    norms = {group + 1: norm for group, norm in emulator.grad_norms.items()}
    path = Path(folder) / "record"
    path.mkdir(parents=True, exist_ok=True)
    (path / "0.json").write_text(json.dumps({"steps": steps, "validations": {}, "norms": norms}))

"""torchtitan on CPUs with gloo, a loader whose tokens anyone can make again, and a record of what a run logs.

Import this before torchtitan, which asks for its device once. Patched are four places that torchtitan leaves to a GPU.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import cpu_device  # isort: skip  (before torchtitan)
import torch
import torchtitan.components.metrics as metrics
import torchtitan.distributed.fsdp as fsdp
import torchtitan.distributed.utils as dist_utils
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

VOCABULARY, LENGTH = 64, 32  # of the tokens drawn, which leave something to learn, and of a row


class NoMemoryMonitor:
    device_name = "cpu"

    def get_peak_stats(self):
        return metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self):
        pass


divided = fsdp.disable_fsdp_gradient_division


def summed(model):
    """gloo cannot scale on the way."""
    divided(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


if cpu_device.ON_CPU:
    metrics.build_device_memory_monitor = NoMemoryMonitor
    dist_utils.set_pg_timeouts = lambda **_: None
    fsdp.disable_fsdp_gradient_division = summed


def row(index):
    """Row `index` of the data: a walk that mostly goes on by a fixed stride."""
    random = torch.Generator().manual_seed(index)
    strides = torch.where(torch.rand(LENGTH + 1, generator=random) < 0.8, 3, 1 + index % 5)
    return (torch.randint(0, VOCABULARY, (1,), generator=random) + strides.cumsum(0)) % VOCABULARY


class Rows(BaseDataLoader):
    """Row n x ranks + rank is the n-th of a data rank: a step of all ranks has the same rows however many they are."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **_):
        self.rows, self.rank, self.ranks, self.drawn = local_batch_size, dp_rank, dp_world_size, 0

    def __iter__(self):
        while True:
            first = self.drawn
            self.drawn += self.rows
            found = torch.stack([row(n * self.ranks + self.rank) for n in range(first, self.drawn)])
            yield {"input": found[:, :-1].contiguous()}, found[:, 1:].contiguous()

    def state_dict(self):
        return {"rows": self.drawn * self.ranks}

    def load_state_dict(self, state):
        self.drawn = state.get("rows", 0) // self.ranks


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        pass

    def encode(self, *_, **__):
        raise NotImplementedError

    decode = get_vocab_size = encode


MODELS = {"llama3": llama3_debugmodel, "qwen3": qwen3_debugmodel}


def debug_config(folder, model="llama3", **given):
    """torchtitan's debug model. `given`: dotted names of its config, as {"training.steps": 3}."""
    config = MODELS[model]()
    if config.model_spec.model.enable_weight_tying:  # torchtitan then gives values to the head alone
        config.model_spec.model.enable_weight_tying = False
        # As torchtitan's Llama has it. Narrow ones are divided by their own small norm: gradients jump a hundredfold,
        # and with them what two runs differ by in rounding.
        config.model_spec.model.tok_embeddings.param_init = {"weight": nn.init.normal_}
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.loss = config.loss.loss_fn  # in one piece
    config.dataloader = Rows.Config()
    config.tokenizer = NoTokenizer.Config()
    config.validator.dataloader = Rows.Config()
    config.activation_checkpoint = None
    config.training.disable_cuda_graphs = True
    config.training.seq_len = LENGTH
    config.training.mixed_precision_param = "float32"
    config.optimizer.implementation = "foreach"
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.lr_scheduler.warmup_steps = 4
    config.lr_scheduler.total_steps = 40
    config.dump_folder = str(folder)
    change(config, given)
    return config


def change(config, given):
    for name, value in given.items():
        *path, last = name.split(".")
        place = config
        for part in path:
            place = getattr(place, part)
        assert hasattr(place, last), name
        setattr(place, last, value)


class Record:
    """What each step logs on this rank, as JSON in `folder` when the run ends."""

    def __init__(self, trainer, folder):
        self.trainer, self.folder, self.steps, self.validations = trainer, Path(folder), {}, {}
        processor = trainer.metrics_processor
        log, log_validation = processor.log, processor.log_validation

        def logged(step, loss, most, norm, extra_metrics=None):
            self.steps[step] = {"loss": loss, "norm": norm, **(extra_metrics or {})}
            log(step, loss, most, norm, extra_metrics=extra_metrics)

        def validated(loss, step):
            self.validations[step] = loss
            log_validation(loss=loss, step=step)

        processor.log, processor.log_validation = logged, validated

    def write(self):
        engine = getattr(self.trainer, "_engine", None)
        norms = {} if engine is None else {group + 1: norm for group, norm in engine.grad_norms.items()}
        found = {"steps": self.steps, "validations": self.validations, "norms": norms}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))

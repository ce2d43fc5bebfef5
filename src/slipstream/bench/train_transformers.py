"""One process of `slipstream bench train`: transformers' LlamaForCausalLM with AdamW, as people train it.

float32 weights under bfloat16 autocast on a GPU (`narrow`: bfloat16 weights, which is faster and loses small
updates), attention through torch's own kernels, torch's fused AdamW, gradients accumulated over the same sequences
as ours; no clipping and no log, which we have and it is spared. Where a microbatch does not fit into memory it is
halved and there are twice as many.
"""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.bench.train_setting import Measured, Setting, timed
from slipstream.data.tokens import TokenDataset
from slipstream.errors import UserError
from slipstream.models.sizes import PRESETS
from slipstream.train.batches import Share, ahead
from slipstream.train.export import hugging_face_config
from slipstream.train.reporter import memory_bytes


def measure(setting: Setting, data: Path, *, compiled: bool, narrow: bool = False) -> Measured:
    """Time the updates; see the module's docstring for the settings."""
    began = time.perf_counter()
    if setting.rival_rows is not None:
        sequences = setting.rows * setting.microbatches
        setting = replace(setting, rows=setting.rival_rows, microbatches=sequences // setting.rival_rows)
    while True:
        try:
            return _measure(setting, data, compiled, narrow, began)
        except torch.OutOfMemoryError:
            if setting.rows % 2:
                raise
        setting = replace(setting, rows=setting.rows // 2, microbatches=setting.microbatches * 2)
        _forget()


def _forget() -> None:
    """Leave nothing of an attempt that did not fit: neither its memory, nor its peak, nor its graphs, whose other
    shapes would make the next ones dynamic."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _measure(setting: Setting, data: Path, compiled: bool, narrow: bool, began: float) -> Measured:
    device = torch.device(setting.device)
    model = _model(setting, device)
    if narrow:
        model = model.to(torch.bfloat16)
    call: Any = torch.compile(model) if compiled else model
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    dataset = TokenDataset(data, "train", setting.sequence, setting.rows * setting.microbatches)

    def settle() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    with ahead(dataset, Share(setting.microbatches, pin=on_gpu), 0) as loader:

        def step(index: int) -> None:
            inputs = loader.get(index).to(device).inputs
            assert inputs is not None
            for tokens in inputs.split(setting.rows):
                with torch.autocast("cuda", torch.bfloat16) if on_gpu and not narrow else nullcontext():
                    loss = call(input_ids=tokens, labels=tokens).loss
                (loss / setting.microbatches).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        seconds, setup = timed(step, settle, setting, began)
    return Measured(seconds, setup, memory_bytes(), setting.rows, setting.microbatches)


def _model(setting: Setting, device: torch.device) -> nn.Module:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise UserError(
            "transformers is not installed, so there is nothing to compare with. "
            "Install it, or set --contenders ours,ours_sync."
        ) from None
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    described = hugging_face_config(PRESETS[setting.model], setting.sequence, torch.float32)
    config = LlamaConfig(**described | {"attn_implementation": "sdpa", "use_cache": False})
    with device:
        return LlamaForCausalLM(config).train()

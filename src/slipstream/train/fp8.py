"""Products with the matrices of a stage's layers in fp8, by torchao: operands are scaled to fp8 as they come, results
are bfloat16.

Weights, their gradients and everything between two products stay as `train.dtype` has them, so banks, master,
optimizer and checkpoints know nothing of it. The head, the products inside attention and routed experts are not
computed so. A forward of validation computes as one of training does.

On a CPU torchao emulates it, for studies of the loss: operands are rounded to fp8 and multiplied in float32.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn

from slipstream.errors import UserError, install
from slipstream.models.sizes import FP8_SIDE

LEAST_CAPABILITY = (8, 9)  # of a GPU with products in fp8


def check_fp8(device: torch.device) -> None:
    """Refuse where it cannot be had."""
    if find_spec("torchao") is None:
        raise UserError(f"train.fp8 needs torchao, which is not installed. {install('fp8')}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise UserError(
            "train.fp8 needs a GPU that multiplies in fp8 (compute capability 8.9 or later, as H100 or L40). Drop it."
        )


def in_fp8(module: nn.Module, recipe: str) -> None:
    """Exchange the linear layers of a replica for such; parameters and their names stay."""
    # Each rank would print two paragraphs about how torchao registers its enumerations with torch.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # seconds to import

    emulated = not any(parameter.is_cuda for parameter in module.parameters())
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulated)
    convert_to_float8_training(module, module_filter_fn=suits, config=config)


def suits(module: nn.Module, name: str) -> bool:
    """Of the layers, where their sides fit; a router decides by small differences, and is computed in float32."""
    if not isinstance(module, nn.Linear) or not name.startswith("layers.") or name.endswith("router"):
        return False
    return module.in_features % FP8_SIDE == 0 and module.out_features % FP8_SIDE == 0

"""Which parameters are hidden matrices.

A parameter is a hidden matrix if it has two dimensions, or three (experts stacked as [E, out, in]), and is
not part of an embedding or of the head. That is read off, in this order: the marker
`parameter.slipstream_role` ("matrix", "embedding", "head" or "vector"), the module that holds it, its name.
A tied parameter has several modules and names: one that is an embedding's or a head's is enough.

Invariant: never its position, which depends on how the model was cut into stages.
"""

from __future__ import annotations

from torch import nn
from torch.nn import Parameter

_EMBEDDING_WORDS = ("embed", "wte", "wpe")
_HEAD_NAMES = ("head", "lm_head", "output")


def split_parameters(module: nn.Module) -> tuple[list[Parameter], list[Parameter]]:
    """The trainable parameters of a stage: hidden matrices, and the rest, each in the module's order."""
    names: dict[Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    matrices: list[Parameter] = []
    rest: list[Parameter] = []
    for parameter, own in names.items():
        found = (is_matrix(name, parameter, module.get_submodule(name.rpartition(".")[0])) for name in own)
        (matrices if all(found) else rest).append(parameter)
    return matrices, rest


def is_matrix(name: str, parameter: Parameter, owner: nn.Module) -> bool:
    role = getattr(parameter, "slipstream_role", None)
    if role is not None:
        return role == "matrix"
    if parameter.ndim not in (2, 3) or isinstance(
        owner, nn.Embedding | nn.EmbeddingBag | nn.Conv1d | nn.ConvTranspose1d
    ):
        return False
    words = name.lower().split(".")
    if any(part in word for word in words for part in _EMBEDDING_WORDS):
        return False
    # `layers.3.attention.output.weight` is a hidden matrix; the model's own head stands outside the layers.
    in_a_layer = any(word.isdigit() for word in words)
    return in_a_layer or not any(word in _HEAD_NAMES for word in words)

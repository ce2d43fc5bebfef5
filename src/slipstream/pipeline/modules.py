"""What weight versions ask of a user's module: no batch statistics, no buffers that a forward changes, one Parameter
for each name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from slipstream.errors import UserError


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, `module` is in evaluation mode; afterwards each of its parts is in the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def split_shared(module: nn.Module) -> list[list[str]]:
    """Give every name its own Parameter and say which names were one: the tied weights inside this module.

    Tied weights are separate tensors at every depth: their gradients are summed by the update, not by autograd,
    whose order of summation would depend on where the model is cut.
    """
    names: dict[int, list[str]] = {}
    places: set[tuple[int, str]] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        place = id(module.get_submodule(path)), leaf
        if place not in places:  # a module that is used twice holds its parameters once
            places.add(place)
            names.setdefault(id(parameter), []).append(name)
    ties = [shared for shared in names.values() if len(shared) > 1]
    for shared in ties:
        original = module.get_parameter(shared[0])
        for name in shared[1:]:
            path, _, leaf = name.rpartition(".")
            twin = nn.Parameter(original.detach().clone(), requires_grad=original.requires_grad)
            for marker, value in vars(original).items():  # such as a parameter's role
                setattr(twin, marker, value)
            setattr(module.get_submodule(path), leaf, twin)
    return ties


def check_layers(module: nn.Module) -> None:
    """Refuse layers that the rule cannot follow: batch statistics change in the forward, so a replica and a restart
    would each have their own, and sparse gradients have no norm, no reduction and no look-ahead."""
    for name, child in module.named_modules():
        name = name or type(child).__name__
        if getattr(child, "track_running_stats", False) and getattr(child, "running_mean", None) is not None:
            raise UserError(
                f"'{name}' changes its running statistics in the forward, which weight versions cannot follow. Use a "
                "norm without running statistics (LayerNorm, RMSNorm, GroupNorm) or track_running_stats=False."
            )
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise UserError(
                f"'{name}' makes sparse gradients, which the update does not take. Set sparse=False."
            )


def refuse_changed_buffers(names: Sequence[str], master: nn.Module, replica: nn.Module) -> None:
    """The same for any other module, once its forwards have run."""
    for name in names:
        before, after = master.get_buffer(name), replica.get_buffer(name)
        if not torch.equal(before, after) and not before.isnan().any():  # not a number is never equal
            raise UserError(
                f"The forward changed the buffer '{name}', which weight versions cannot follow: each copy of the "
                "module has its own. Keep it outside the module, or make it persistent=False if it is a cache."
            )

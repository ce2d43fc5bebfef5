"""A master of which this rank does not hold everything: each data rank its own parameters only (ZeRO-1), or a compact
one, which has no memory between updates.

A parameter that another rank owns keeps its shape and no memory: its data is one element, expanded. It does not
require a gradient, so optimizers make no state for it. `materialised` brings the whole master together for an
evaluation or an export.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from slipstream.errors import UserError
from slipstream.optim.sharded import local
from slipstream.pipeline.peers import Peers
from slipstream.pipeline.versions import Versions


def collapse(versions: Versions, owned: Sequence[int]) -> None:
    """Free the parameters of the master that are not owned here."""
    keep = set(owned)
    versions.partial = True
    for index, parameter in enumerate(versions.master.parameters):
        if index not in keep:
            parameter.requires_grad_(False)
            parameter.data = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(
                parameter.shape
            )
            versions.master.weights[index] = local(parameter)


def make_whole(versions: Versions) -> None:
    """A compact master gets its memory back for good: nobody will put it together any more, and reading freed memory is
    no error but a crash. The replicas give theirs. What other data ranks own stays with them. After a failure inside an
    update some weights are of before it and some of after: they are lost, and it says so."""
    compact, versions.compact = versions.compact, None
    if compact is None:
        return
    for replica in versions.replicas:
        if replica is not compact.high:
            replica.free()
    versions.lost = not compact.intact
    if versions.lost:
        compact.lose()
    else:
        compact.make_whole()
        versions.partial = len(versions.owned) < len(versions.names)
    compact.high.free()


def refuse_to_save(versions: Versions) -> None:
    """A module that has only a part of its weights must not save the rest as zeros, nor may any part of it."""

    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        refuse_lost(versions)
        if versions.partial:
            raise UserError(
                "This module does not hold its weights: the optimizer is sharded, or the master compact. Use `with "
                "schedule.gathered_master() as module: module.state_dict()`, on all ranks together, or "
                "schedule.state_dict() for what this rank owns."
            )

    trained = {id(parameter) for parameter in versions.master.parameters}
    for module in versions.module.modules():
        if any(id(parameter) in trained for parameter in module.parameters()):
            module.register_state_dict_pre_hook(hook)


def refuse_lost(versions: Versions) -> None:
    if versions.lost:
        raise UserError(
            "This schedule failed inside an update, and its weights with it: a compact master is stepped a part at a "
            "time. Make a new one and load a state."
        )


@contextlib.contextmanager
def materialised(versions: Versions, peers: Peers) -> Iterator[None]:
    """Inside, every rank has the whole master; all data ranks must enter together. What is changed in it stays."""
    if versions.compact is not None:
        versions.compact.make_whole()
    keep = set(peers.owned)
    for index, parameter in enumerate(versions.master.parameters):
        if index not in keep:
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            versions.master.weights[index] = local(parameter)
    for step in peers.gather(versions.master.weights):
        step.wait()
    versions.partial = False
    try:
        yield
    finally:
        collapse(versions, peers.owned)
        if versions.compact is not None:
            versions.compact.take_apart()

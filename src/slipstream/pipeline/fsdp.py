"""What FSDP2 has to be told: when to reduce gradients, and when a bank's weights may be given back.

A bank does not change while a group reads it, so its weights are gathered once: they stay whole from one microbatch to
the next (unless the user chose `reshard_after_forward`) and are given back after the group's last backward, before the
next bank is written into them. Weights that stay whole beyond that would be read again, stale.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """The parts that `fully_shard` was applied to: the root need not be one of them."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def before_backward(modules: Sequence[FSDPModule], last: bool) -> None:
    """Gradients are reduced, and weights given back, in the backward of a group's last microbatch only."""
    for module in modules:
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last, recurse=False)
        module.set_reshard_after_backward(last, recurse=False)


def give_back(modules: Sequence[FSDPModule]) -> None:
    """Free the whole weights; the next forward gathers what is written into the shards by then."""
    for module in modules:
        module.reshard()


def sum_gradients(modules: Sequence[FSDPModule]) -> None:
    """Over data ranks, where the loss has been divided by the global number of tokens already."""
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(
            True
        )  # gloo cannot scale on the way, and there is nothing to scale

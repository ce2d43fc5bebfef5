"""Our optimizers in torchtitan's container, which its schedulers and checkpoints know."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer

from slipstream.errors import UserError
from slipstream.optim import build


class Optimizers2BW(OptimizersContainer):
    """One optimizer of ours over a stage: hidden matrices and the rest, as `slipstream.optim.build` makes it."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        name: str = "muon"
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        self.optimizers = [named(build(config.name, part, **config.options), part) for part in model_parts]
        parameters = [p for made in self.optimizers for entry in made.param_groups for p in entry["params"]]
        self._validate_params(parameters)
        self._post_init(parameters)
        for made in self.optimizers:
            made.register_load_state_dict_pre_hook(_with_empty_groups)


def _with_empty_groups(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A stage may have no matrices, or nothing else. torchtitan finds what belongs to a group by a name in it, so such
    a group comes back with nothing: it keeps what it has."""
    groups = [
        saved if saved["params"] else {**own, **saved}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state, "param_groups": groups}


def named(optimizer: Optimizer, module: nn.Module) -> Optimizer:
    """With the names under which torchtitan saves the state of each parameter."""
    names = {id(p): canonical_fqn(name) for name, p in module.named_parameters()}
    for entry in optimizer.param_groups:
        entry["param_names"] = [names[id(p)] for p in entry["params"]]
    return optimizer


def only(container: OptimizersContainer) -> Optimizer:
    """The optimizer of this rank's stage."""
    found = list(container)
    if len(found) != 1:
        kinds = ", ".join(type(one).__name__ for one in found)
        raise UserError(
            f"The stage has {len(found)} optimizers ({kinds}), and an update is one optimizer's. Use one."
        )
    return found[0]

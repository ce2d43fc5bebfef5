"""What a user hands to the engine, checked: modules, optimizers, arguments, tied weights.

Weight versions ask of a module: no batch statistics, no buffers that a forward changes, one Parameter for each name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.errors import UserError
from slipstream.optim.corrections import Correction
from slipstream.pipeline.placement import Placement
from slipstream.pipeline.torch_stage import StageInfo
from slipstream.torch_private import has_grad_hooks


def check_inputs(stage: StageInfo, args: Any, kwargs: Any, has_target: bool) -> None:
    """Inputs belong to the first stage, targets and losses to the last; any stage may have keyword arguments."""
    if stage.first and not (args or kwargs):
        raise UserError("The first stage needs the input: step(x).")
    if args and not stage.first:
        raise UserError(f"Stage {stage.index} takes no input: only the first stage does. Call step().")
    if has_target and not stage.last:
        raise UserError(
            f"Stage {stage.index} of {stage.count} takes no target or losses: only the last stage does."
        )


def named_ties(
    tied: dict[str, str | Sequence[str]] | None, shared: list[list[str]], module: nn.Module, stage: int
) -> dict[str, list[str]]:
    """Tied weights of this stage by name: those the user named, and those that were one Parameter.

    What the user named is tied on every stage that names it. What was one Parameter is this stage's own affair: another
    stage may use the same names for weights of its own.

    Frozen ones never change, so they need no tie; one that is frozen on some of its stages could not stay equal.
    """
    trainable = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    ties: dict[str, list[str]] = {}
    if tied is not None and not isinstance(tied, Mapping):
        raise UserError(
            f"tied={tied!r}: give a dictionary, a name for the weight -> its parameters on this stage."
        )
    for key, names in (tied or {}).items():
        ties[key] = [names] if isinstance(names, str) else list(names)
        for name in ties[key]:
            if name not in trainable:
                raise UserError(f"tied={{{key!r}: {name!r}}}: this stage has no such parameter.")
            if not trainable[name]:
                raise UserError(
                    f"tied={{{key!r}: {name!r}}}: this parameter is frozen. Leave it out of tied on every stage, or "
                    "train it on all of them."
                )
    for group in (names for names in shared if trainable[names[0]]):
        key = next(
            (key for key, names in ties.items() if set(names) & set(group)), f"stage {stage}: {group[0]}"
        )
        ties[key] = sorted({*ties.get(key, []), *group}, key=[*group, *ties.get(key, [])].index)
    return ties


def held_ties(
    parameters: Sequence[Tensor], ties: Mapping[str, Sequence[int]], rows: Sequence[Placement]
) -> dict[str, list[tuple[tuple[int, ...], str]]]:
    """Tied weight -> shape and layout of this stage's parameters that hold it."""
    return {
        name: [(tuple(parameters[i].shape), rows[i].layout) for i in indices]
        for name, indices in ties.items()
    }


def check_ties(stages: Sequence[Mapping[str, Sequence[tuple[tuple[int, ...], str]]]]) -> None:
    """`stages`: of each stage, tied weight -> shape and layout of the parameters that hold it there."""
    for name in dict.fromkeys(name for held in stages for name in held):
        every = [(stage, *entry) for stage, held in enumerate(stages) for entry in held.get(name, ())]
        found = [(stage, shape) for stage, shape, _ in every]
        if len(found) == 1:
            raise UserError(
                f"tied={{{name!r}: ...}} names one parameter, on stage {found[0][0]}, and none to tie it to. Give it "
                "on every stage that holds the weight, with its name there."
            )
        if len({shape for _, shape in found}) > 1:
            seen = ", ".join(f"{shape} on stage {stage}" for stage, shape in found)
            raise UserError(f"tied={{{name!r}: ...}} names parameters of different shapes: {seen}.")
        if len({layout for *_, layout in every}) > 1:
            seen = ", ".join(f"{layout} on stage {stage}" for stage, _, layout in every)
            raise UserError(
                f"tied={{{name!r}: ...}} names parameters that are laid out differently: {seen}. Cut them alike."
            )


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
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and has_grad_hooks(parameter):
            raise UserError(
                f"'{name}' has a gradient hook, which copies of the module, one for each weight version, would not "
                "have. Put what it does into the forward (torch.nn.utils.parametrize), or into a correction."
            )
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
    """What `check_layers` cannot know of a module, once its forwards have run."""
    for name in names:
        before, after = master.get_buffer(name), replica.get_buffer(name)
        if not torch.equal(before, after) and not before.isnan().any():  # not a number is never equal
            raise UserError(
                f"The forward changed the buffer '{name}', which weight versions cannot follow: each copy of the "
                "module has its own. Keep it outside the module, or make it persistent=False if it is a cache."
            )


NO_FACTORY = (
    "optimizer must be a callable that takes the master module and returns a torch optimizer, for example "
    "lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3)."
)


def optimizer_of(factory: Callable[[nn.Module], Optimizer], module: nn.Module) -> Optimizer:
    """What the user's factory makes of a stage, and a stand-in where there is nothing to train: no parameters, frozen
    ones, or on a data rank that owns none of them. A factory that asks for what is trainable then finds nothing, which
    torch's optimizers refuse."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        try:
            made = factory(module)
        except TypeError as error:
            if isinstance(factory, type) and issubclass(factory, Optimizer):
                raise UserError(f"{NO_FACTORY} {factory.__name__}(module) says: {error}.") from error
            raise
        if not hasattr(made, "param_groups"):
            raise UserError(
                f"optimizer(module) returned {type(made).__name__}, not a torch optimizer. Return one that holds the "
                "module's parameters."
            )
        return made
    with contextlib.suppress(ValueError):
        if list(module.parameters()):
            return factory(module)
    return torch.optim.SGD([{"params": []}])  # something for a learning-rate scheduler


def check_pieces(correction: Correction, rows: Sequence[Placement]) -> None:
    """Whether the correction can work on what this rank holds of each tensor."""
    cut = next((row for row in rows if row.cut), None)
    if cut is not None and not correction.on_pieces:
        raise UserError(
            f"The correction {correction.name} measures whole tensors, and '{cut.name}' is laid out as {cut.layout}. "
            "Use error_feedback."
        )


def check_covers(optimizer: Optimizer, module: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
    """Every parameter that is trained must be the optimizer's, and nothing that is not in the master may be."""
    held = [p for entry in optimizer.param_groups for p in entry["params"]]
    own, found = {id(p) for p in module.parameters()}, {id(p) for p in held}
    foreign = [tuple(p.shape) for p in held if id(p) not in own]
    if foreign:
        raise UserError(
            f"The optimizer holds {len(foreign)} parameters that are not the master's (shape {foreign[0]}). "
            "No update would see their gradients: put what is trained (of a loss, say) into the stage's module."
        )
    missing = [name for name, p in trained.items() if id(p) not in found]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise UserError(
            f"The optimizer misses {len(missing)} trainable parameters of the master: {shown}. "
            "Build it from module.parameters() of the module it is given, or freeze them with requires_grad_(False)."
        )

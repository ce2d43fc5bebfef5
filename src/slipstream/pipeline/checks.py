"""What a user hands to the engine, checked: arguments, tied weights, what a stage returns.

Each check says what is wrong, the values seen, and what to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.errors import UserError
from slipstream.pipeline.messages import Spec
from slipstream.pipeline.placement import Placement
from slipstream.pipeline.torch_stage import StageInfo
from slipstream.torch_private import tree_map


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


def as_message(output: Any) -> list[Tensor]:
    outputs = list(output) if isinstance(output, tuple | list) else [output]
    for item in outputs:
        if not isinstance(item, Tensor):
            raise UserError(f"A stage must return tensors for the next one, not {type(item).__name__}.")
        if isinstance(item, DTensor):
            raise UserError(
                f"A stage returned a DTensor laid out as {item.placements}. Links carry plain tensors: let its last "
                "layer give a local one (output_layouts=Replicate(), use_local_output=True)."
            )
    return outputs


def detached(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def shapes(spec: Spec) -> str:
    return ", ".join(f"{tuple(s.shape)} {str(s.dtype).removeprefix('torch.')}" for s in spec)

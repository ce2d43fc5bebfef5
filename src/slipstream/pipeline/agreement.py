"""What the stages of a pipeline, and their data ranks, tell each other at the start, and what they must agree on.

They are as many programs as ranks, and nothing but this would notice that one of them was told something else: each
would follow a rule of its own, and their losses would still look well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.errors import UserError
from slipstream.pipeline.checks import check_ties

Names = Mapping[str, str | None]  # of trainable parameters, each with the weight that it is tied to


@dataclass(frozen=True)
class Told:
    """By one rank of each stage of a pipeline."""

    stage: int
    rank: int  # among all ranks
    sizes: tuple[int, int]  # data and tensor ranks that hold the stage
    names: Names
    ties: dict[str, list[tuple[tuple[int, ...], str]]]  # tied weight -> shapes and layouts of what holds it
    settings: dict[str, object]  # argument -> value, of those that are the same on all ranks


def check_agree(told: Sequence[Told], ranks: Sequence[int]) -> None:
    """`told`: by the ranks of the pipeline's group, `ranks`, in their order."""
    stages = list(range(len(ranks)))
    if sorted(each.stage for each in told) != stages:
        raise UserError(
            f"The ranks of this pipeline hold stages {sorted(each.stage for each in told)}, not 0 to {stages[-1]}."
        )
    if [each.stage for each in told] != stages:
        raise UserError(
            f"Ranks {list(ranks)} of this pipeline hold stages {[each.stage for each in told]}. Stages talk to their "
            "neighbours in the group: give its first rank stage 0, its second stage 1, and so on."
        )
    first = told[0]
    for other in told[1:]:
        if other.sizes != first.sizes:
            raise UserError(
                f"Stage 0 is held by {first.sizes[0]} data x {first.sizes[1]} tensor ranks, stage {other.stage} by "
                f"{other.sizes[0]} x {other.sizes[1]}. Give mesh= on every stage, with the same dimensions."
            )
    check_alike([each.settings for each in told], [f"stage {each.stage}" for each in told])
    check_ties([each.ties for each in told])


def check_alike(settings: Sequence[Mapping[str, object]], places: Sequence[str]) -> None:
    first = settings[0]
    for other, place in zip(settings[1:], places[1:], strict=True):
        for name, value in first.items():
            if other[name] != value:
                raise UserError(
                    f"{name} is {value!r} on {places[0]} and {other[name]!r} on {place}. Give every rank the same."
                )


def check_group(group: int, means: Sequence[float]) -> None:
    """Of an update: `group` as this rank counts them, and the mean of what the ranks of each stage count.

    Whoever is not where all are differs from some mean; so where no rank objects, all are.
    """
    if any(mean != group for mean in means):
        seen = ", ".join(f"{mean:.12g} on stage {stage}" for stage, mean in enumerate(means))
        raise UserError(
            f"The stages are at different groups: {seen} (means over data ranks). Load states that were saved at one "
            "boundary on all ranks, and call step on all of them alike."
        )


def prefix_of(stage: int) -> str:
    """Of a stage's names in a state, where another stage has the same ones."""
    return f"stage.{stage}."


def names_repeat(stages: Sequence[Names]) -> bool:
    """Whether two stages call different weights by one name, as stages do that were not cut from one model."""
    found: dict[str, str | None] = {}
    for names in stages:
        for name, tie in names.items():
            if name in found and (tie is None or found[name] != tie):
                return True
            found[name] = tie
    return False

"""`build`: a schedule's name and its numbers -> a `Schedule`. The one table of what exists.

A new schedule is one function that returns each rank's order, and one entry here. Every schedule `build`
returns carries the weight versions that `staleness.py` assigns, and passes `validate.check`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.errors import UserError, did_you_mean
from slipstream.schedule import asynchronous, synchronous, zero_bubble
from slipstream.schedule.actions import Action, Schedule, Weights, group_updates
from slipstream.schedule.staleness import with_versions


@dataclass(frozen=True)
class Generator:
    """How a schedule is made and which options it takes beyond stages, microbatches and groups."""

    orders: Callable[..., list]
    summary: str
    weights: Weights = Weights.NEWEST
    synchronous: bool = True
    options: tuple[str, ...] = ()
    default_chunks: int = 1


GENERATORS: dict[str, Generator] = {
    "gpipe": Generator(synchronous.gpipe, "all forwards, then all backwards"),
    "1f1b": Generator(synchronous.one_f_one_b, "one forward, one backward, flush"),
    "interleaved_1f1b": Generator(
        synchronous.interleaved_1f1b,
        "1F1B over several chunks per rank",
        options=("chunks",),
        default_chunks=2,
    ),
    "zb_h1": Generator(zero_bubble.zb_h1, "1F1B with the weight gradient in the bubble"),
    "zbv": Generator(zero_bubble.zbv, "zero bubble on a V of two chunks per rank", default_chunks=2),
    "dualpipev": Generator(zero_bubble.dualpipev, "DualPipe on a V of two chunks per rank", default_chunks=2),
    "pipedream": Generator(
        asynchronous.pipedream, "no flush, weight stashing, delay P-1-s", Weights.STASH, synchronous=False
    ),
    "pipedream_2bw": Generator(
        asynchronous.pipedream_2bw,
        "no flush, two banks, delay 1 up to the cutover",
        Weights.BANKS,
        False,
        ("in_flight", "cutover"),
    ),
    "paci": Generator(asynchronous.paci, "no flush, no stash", Weights.NEWEST, False, ("every",)),
}
ALIASES = {"2bw": "pipedream_2bw", "interleaved": "interleaved_1f1b"}


def canonical(name: str) -> str:
    """The schedule's full name; an unknown one is an error that names the nearest."""
    full = ALIASES.get(name, name)
    if full in GENERATORS:
        return full
    hint = did_you_mean(name, [*GENERATORS, *ALIASES])
    raise UserError(f"There is no schedule '{name}'.{hint} Choose from: {', '.join(GENERATORS)}.")


def build(name: str, stages: int, microbatches: int, groups: int = 1, **options: int | None) -> Schedule:
    """The schedule `name` on `stages` ranks, `groups` updates of `microbatches` each.

    Options: `chunks` (interleaved_1f1b), `in_flight` and `cutover` (pipedream_2bw), `every` (paci). None means the
    default (of a cutover: all microbatches, as PipeDream-2BW has it); an option the schedule does not take is an error.
    """
    full = canonical(name)
    generator = GENERATORS[full]
    given = {key: value for key, value in options.items() if value is not None}
    counts = {key: value for key, value in given.items() if key != "cutover"}
    _check_counts(stages=stages, microbatches=microbatches, groups=groups, **counts)
    old = given.get("cutover")
    if old is not None and (
        isinstance(old, bool) or not isinstance(old, int) or not 0 <= old <= microbatches
    ):
        raise UserError(
            f"A cutover of {old!r} does not fit into {microbatches} microbatches: give how many of them read old "
            f"weights, from 0 (every group waits for the update before it) to {microbatches}."
        )
    for key in given:
        if key not in generator.options:
            takers = [other for other, entry in GENERATORS.items() if key in entry.options]
            whose = f"it belongs to {', '.join(takers)}" if takers else "no schedule does"
            raise UserError(f"The schedule '{full}' does not take '{key}': {whose}.")
    chunks = given.get("chunks", generator.default_chunks)
    if generator.synchronous:
        order = generator.orders(stages, microbatches, **given)
        ranks = [[action for g in range(groups) for action in _group(steps, g)] for steps in order]
    else:
        ranks = generator.orders(stages, microbatches, groups, **given)
    return with_versions(
        Schedule(
            name=full,
            stages=stages,
            microbatches=microbatches,
            groups=groups,
            ranks=tuple(map(tuple, ranks)),
            chunks=chunks,
            weights=generator.weights,
            synchronous=generator.synchronous,
            cutover=old,
        )
    )


def _group(steps: list[synchronous.Step], group: int) -> list[Action]:
    actions = [Action(kind, stage, microbatch, group) for kind, stage, microbatch in steps]
    return actions + group_updates(actions, group)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name} must be a whole number of at least 1, not {value!r}.")

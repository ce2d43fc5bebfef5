"""From a study's cells to entries of the planner's penalty table, each with where its number comes from.

Only what the planner can be asked for becomes an entry: one update of delay, no correction or error feedback at its
own strength, with or without a synchronous or a fine start, and all else as in the synchronous runs it is compared to
(the learning rate may have been tuned for itself). Invariant: a number without synchronous runs beside it is never
written.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.plan.penalty import Penalty, same_place
from slipstream.plan.start import FINE_PARTS, FINE_START, SYNC_START
from slipstream.study.cells import AxisRoles, Cell
from slipstream.study.results import Result
from slipstream.study.statistics import Estimate

_MAY_DIFFER = (
    "pipeline.delay",
    "pipeline.cutover",
    "pipeline.microbatches",
    "pipeline.microbatch_size",
    "pipeline.fine_start",
    "pipeline.fine_microbatches",
    "optim.correction",
    "optim.correction_lambda",
    "optim.sync_start",
    "optim.lr",
    "train.seed",
)
_WRITTEN = ("none", "error_feedback")


def entries(study: str, cells: Sequence[Cell], roles: AxisRoles) -> list[Penalty]:
    """One entry for each compared cell that the planner has a name for; of several lengths, the longest runs'.

    The planner asks by optimizer, correction, batch and model, and would take the first of them.
    """
    references = {cell.group: cell for cell in cells if cell.mode == roles.reference and cell.results}
    found: list[Penalty] = []
    longest_first = sorted(
        cells, key=lambda cell: -max((run.tokens for run in cell.results.values()), default=0)
    )
    for cell in longest_first:
        penalty = cell.penalty or cell.by_length
        if penalty is None or cell.group not in references:
            continue
        result = next(iter(cell.results.values()))
        named = _name(result, next(iter(references[cell.group].results.values())))
        if named is None:
            continue
        entry = Penalty(
            optimizer=result.key("optim.name"),
            correction=named,
            penalty=round(max(1.0, penalty.value), 4),
            batch_tokens=round(result.tokens / result.steps),
            parameters=result.parameters,
            source=_source(study, cell, roles, result),
            gap=None if cell.gap is None else round(cell.gap.value, 4),
            old=round(result.old, 4),
        )
        if not any(same_place(entry, longer) for longer in found):
            found.append(entry)
    return found


def _name(result: Result, reference: Result) -> str | None:
    """The planner's word for what was done about delay; None where it has none."""
    correction, strength = result.key("optim.correction"), result.key("optim.correction_lambda", 1.0)
    if correction not in _WRITTEN or strength != 1.0 or result.key("pipeline.delay") != 1 or not result.old:
        return None
    if isinstance(result.key("pipeline.cutover"), list):
        return None  # stages that switch one by one: the engine's do it together
    if result.setting(*_MAY_DIFFER) != reference.setting(*_MAY_DIFFER):
        return None
    starts = {
        "sync_start": (result.key("optim.sync_start", 0), SYNC_START),
        "fine_start": (result.key("pipeline.fine_start", 0), FINE_START),
    }
    taken = {name: share == planned for name, (share, planned) in starts.items() if share}
    if not taken:
        return correction
    (name, planned), *more = taken.items()
    if more or not planned or correction != "error_feedback":
        return None
    if name == "fine_start" and result.key("pipeline.fine_microbatches") != FINE_PARTS * result.key(
        "pipeline.microbatches"
    ):
        return None
    return f"{correction}+{name}"


def _source(study: str, cell: Cell, roles: AxisRoles, result: Result) -> str:
    penalty = cell.penalty or cell.by_length
    assert penalty is not None
    seeds = penalty.n
    text = f"study {study}: {seeds} paired seed{'s' if seeds != 1 else ''}"
    if penalty.interval is not None:
        low, high = penalty.interval
        text += f", 95 % interval [{low:.3f}, {high:.3f}]"
    text += (
        f"; {result.parameters / 1e6:.1f}M parameters, {result.tokens / result.parameters:.1f} tokens per parameter, "
        f"lr {result.key('optim.lr', 'default')}"
    )
    if result.old < 1:
        text += f", {100 * result.old:.0f} % of each update old"
    if start := result.key("optim.sync_start"):
        text += f", synchronous start of {f'{100 * start:g} %' if start < 1 else f'{start:g}'}"
    if start := result.key("pipeline.fine_start", 0):
        text += f", fine start of {100 * start:g} %"
    beyond = ", extrapolated" if penalty.extrapolated else ""
    if cell.penalty is not None:
        text += f"; read off the synchronous run's own curve{beyond}"
        if (length := cell.by_length) is not None:
            text += f" (by length {_least(length)}{length.value:.3f})"
    else:
        text += f"; {_least(penalty)}read off final losses by {roles.length or 'length'}{beyond}"
    if penalty.value < 1:
        text += f"; measured {penalty.value:.3f}, taken as 1"
    return f"{text}; runs {', '.join(one.digest for one in cell.results.values())}"


def _least(penalty: Estimate) -> str:
    return "at least " if penalty.least else ""

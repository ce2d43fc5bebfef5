"""What a schedule keeps alive, counted from its order: activations in flight and weight versions (banks).

Each rank runs its actions one after another, so how much is alive between two actions follows from the
order and needs no clock. A microbatch's activations live from its forward to the end of its backward
(of W, where the backward is split); a weight version lives from its publication to its last read, and the
newest version always lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slipstream.schedule.actions import Action, Kind

_FREES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def peak_activations(ranks: Sequence[Iterable[Action]], stages: int) -> tuple[int, ...]:
    """The most microbatches in flight on each model stage."""
    peaks = [0] * stages
    for actions in ranks:
        alive = [0] * stages
        for action in actions:
            if action.kind is Kind.FORWARD:
                alive[action.stage] += 1
                peaks[action.stage] = max(peaks[action.stage], alive[action.stage])
            elif action.kind in _FREES:
                alive[action.stage] -= 1
    return tuple(peaks)


def peak_rank_activations(ranks: Sequence[Iterable[Action]]) -> tuple[int, ...]:
    """The most microbatches in flight on each rank, all its chunks together (in chunk activations)."""
    peaks = []
    for actions in ranks:
        alive = peak = 0
        for action in actions:
            if action.kind is Kind.FORWARD:
                alive += 1
                peak = max(peak, alive)
            elif action.kind in _FREES:
                alive -= 1
        peaks.append(peak)
    return tuple(peaks)


def banks(ranks: Sequence[Sequence[Action]], stages: int) -> tuple[int, ...]:
    """The most weight versions alive at once on each model stage."""
    peaks = [1] * stages
    for actions in ranks:
        last_read = {
            (action.stage, action.version): position
            for position, action in enumerate(actions)
            if action.kind is not Kind.UPDATE
        }
        alive: dict[int, set[int]] = {}
        for position, (kind, stage, _, _, version) in enumerate(actions):
            if version is None:
                continue
            versions = alive.setdefault(stage, {version})
            if kind is Kind.UPDATE:
                # A version without a later read survives only while it is the newest.
                versions = {v for v in versions if last_read.get((stage, v), -1) > position} | {version}
                alive[stage] = versions
            else:
                versions.add(version)
                newest = max(versions)
                if last_read[stage, version] == position and version != newest:
                    versions.discard(version)
            peaks[stage] = max(peaks[stage], len(versions))
    return tuple(peaks)

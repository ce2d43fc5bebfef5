"""How many microbatches to keep in flight: as few as hide the links.

With the least warm-up every input arrives just when it is needed, so a link of L seconds one way adds
2 (P-1) L / P to each forward-and-backward of T seconds. A link is hidden when the stage before it is ahead of the
stage behind it by 1 + ceil(2L / T) pairs instead of one (stages alternate strictly, so a part of a pair hides
nothing): K - 1 = w_0 = (P-1)(1 + ceil(2L / T)). Each further microbatch costs its activations on stage 0. To L is
added how much longer than the least a forward and backward typically take: a stage that is late by chance delays
its neighbours just as a slow link does.

A cutover more than one below that number (`schedule/cutover.py`) may have every group begin with a part of a flush,
which costs more than a fast link and less than a slow one. And the more are in flight, the less is left to do while an
update runs. So on a GPU that number is only the most that is tried (`depth_trial.py`). On a host, whose times are too
uneven for a trial, `within_cutover` asks the simulator.

Times are taken when a stage has settled: while its calls are still being recorded (`stage_graphs.py`) some take ten
times as long as others, which would pass for jitter.

No stage is given more than its GPU has memory for (`room.py`); the least, P in flight, is what a layout was chosen by.

On a host stages are ahead by `HOST_LEAD` pairs more. Cores are late for several microbatches
in a row (other programs, clocks), and their memory is cheap.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from operator import add

import torch

from slipstream.pipeline.depth_trial import Trial, depths_to_try
from slipstream.pipeline.peers import RankStatus, RunStatus
from slipstream.pipeline.room import Room
from slipstream.schedule.asynchronous import warm_up_2bw
from slipstream.schedule.costs import Costs
from slipstream.schedule.cutover import Cutover
from slipstream.schedule.generate import build
from slipstream.schedule.simulate import simulate

logger = logging.getLogger("slipstream")

# A loss below this share of the time is not worth twice the activations.
NEGLIGIBLE = 0.01

# Measured on two shared cores, P=2, in turns with the bound (docs/notes/engine.md): m=2, 2 and 3 in flight: 0.91, 0.97;
# m=4, 2 to 5 in flight: 0.91, 0.97, 0.97, 0.98; m=8, 4, 6 and 9 in flight: the same.
HOST_LEAD = 3
NOT_SETTLED = math.inf  # seconds that a stage tells while it is recorded
MOST_GROUPS_TO_SETTLE = 40
_GROUPS = 6  # simulated to compare two depths


def choose_in_flight(
    stages: int, microbatches: int, work_seconds: float, link_seconds: float, on_host: bool = False
) -> int:
    """The number in flight on stage 0, from P (the least) to m + 1, the most that two banks allow.

    The last one leaves no slack for the update, which waits for less than a message that comes late (measured on two
    cores and over NCCL: docs/notes, engine.md and transports.md).
    """
    if stages == 1 or work_seconds <= 0:
        return stages
    lead = math.ceil(2 * link_seconds / work_seconds)
    lost = 2 * (stages - 1) * link_seconds / (stages * work_seconds)
    if on_host:
        lead = max(lead, HOST_LEAD)
    elif lost < NEGLIGIBLE:
        return stages
    return min(1 + (stages - 1) * (1 + lead), microbatches + 1)


def within_cutover(
    stages: int,
    microbatches: int,
    chosen: int,
    cutover: int,
    work_seconds: float,
    link_seconds: float,
    late_seconds: float = 0.0,
) -> int:
    """As many as the cutover allows without a flush, or, where updates are shorter by the simulator, what hides the
    links and the lateness.

    That is one more than are old, since w_0 = c come before the backward that ends the group before. Then no pair is
    left to hide an update's exchange. It is worth that where stages are late by a twentieth, which on a host they are,
    and where the exchange is a matter of hundredths.

    A pure function of times that all stages have heard, so all of them come to the same answer.
    """

    def seconds(in_flight: int, link: float) -> float:
        # The update's own exchange crosses the links as well.
        costs = Costs(work_seconds / 3, 2 * work_seconds / 3, latency=link, update_latency=link)
        schedule = build("pipedream_2bw", stages, microbatches, _GROUPS, in_flight=in_flight, cutover=cutover)
        return simulate(schedule, costs).time_per_update

    if cutover >= microbatches:
        return chosen
    latency = link_seconds + late_seconds
    best = min(chosen, max(stages, cutover))
    wanted = min(1 + (stages - 1) * (1 + math.ceil(2 * latency / work_seconds)), microbatches + 1)
    if best < wanted and seconds(wanted, latency) < seconds(best, latency) * (1 - NEGLIGIBLE):
        best = wanted
    one_more = min(chosen, cutover + 1)
    if best < one_more and seconds(one_more, link_seconds) <= seconds(best, link_seconds) * (1 + NEGLIGIBLE):
        best = one_more
    return best


def within_room(stages: int, microbatches: int, chosen: int, room: Sequence[float]) -> int:
    """`chosen`, or as many as every stage can hold: `room`, by stage, is what it could beside those of P in flight."""
    least = warm_up_2bw(stages, microbatches)
    fits = (
        in_flight
        for in_flight in range(chosen, stages, -1)
        if all(
            more - few <= left
            for more, few, left in zip(warm_up_2bw(stages, microbatches, in_flight), least, room, strict=True)
        )
    )
    return next(fits, stages)


class Depth:
    """How far one stage runs ahead: as told, or chosen once from times that all stages measured and exchanged."""

    def __init__(
        self,
        stage: int,
        stages: int,
        microbatches: int,
        in_flight: int | None,
        on_host: bool,
        cutover: Cutover,
    ) -> None:
        self._stage, self._stages, self._microbatches = stage, stages, microbatches
        self._cutover = cutover
        self._on_host = on_host
        # It is not chosen yet. On a GPU a run whose groups are all flushed has nothing to choose.
        self.is_open = in_flight is None and stages > 1 and (on_host or cutover.most > 0)
        self._decided_at: int | None = None
        self._decided_by = 0  # the group by which it is chosen, settled or not
        self._trial: Trial | None = None
        self._unsettled = 0  # groups until the times of one hold nothing of a call that was recorded
        self._set(in_flight)
        self.link_seconds = 0.0  # one way to the next stage
        self.room = Room(torch.device("cpu"))  # on a GPU the runtime puts its own here

    def _set(self, in_flight: int | None) -> None:
        every = warm_up_2bw(self._stages, self._microbatches, in_flight)
        self.warm_up = every[self._stage]  # w_s
        self.warm_up_behind = every[self._stage + 1] if self._stage + 1 < self._stages else 0
        self.lead = every[self._stage - 1] - self.warm_up if self._stage > 0 else 0  # of the stage before

    def begin_again(self) -> None:
        """After a state was loaded groups are counted from another number."""
        if self.is_open:
            self._decided_at = self._trial = None
            self._set(None)

    @property
    def asks_for_room(self) -> bool:
        """Whether what forwards leave in memory is of interest."""
        return self.is_open and self._trial is None

    def adapt(self, group: int, statuses: Mapping[int, RunStatus]) -> None:
        """Before `group` enters, if it is one at which every stage knows the same times. Where this makes it less, what
        is in flight beyond it should land before the next forward."""
        if not self.is_open:
            return
        if self._trial is not None:
            self._try(self._trial, group, statuses[group - 2])
            return
        if self._decided_at is None:
            self._decided_at = group + 3  # update group + 1 is done on every stage before that group enters
            self._decided_by = self._decided_at + MOST_GROUPS_TO_SETTLE
        if group == self._decided_at:
            told = statuses[group - 2]
            if NOT_SETTLED not in told.work_seconds:  # the same on all stages
                self._decide(group, told)
            elif group < self._decided_by:
                self._decided_at += 1
            else:
                self.is_open = False

    def _decide(self, group: int, told: RunStatus) -> None:
        stages, m, cutover = self._stages, self._microbatches, self._cutover.most
        work, link = max(told.work_seconds), max(told.link_seconds)
        latency = max(map(add, told.link_seconds, told.late_seconds))
        chosen = choose_in_flight(stages, m, work, latency, self._on_host)
        if self._on_host:
            self.is_open = False
            self._set(
                within_cutover(stages, m, chosen, cutover, work, link, latency - link) if work > 0 else chosen
            )
            return
        held = within_room(stages, m, chosen, told.room)
        if held < chosen and self._stage == 0:
            said = "At most %d microbatches in flight: late messages may ask for %d, which a GPU has no memory for."
            logger.info(said, held, chosen)
        if held > stages:
            self._trial = Trial(depths_to_try(stages, cutover, held), group)
        else:
            self.is_open = False

    def _try(self, trial: Trial, group: int, told: RunStatus) -> None:
        flushed = self._cutover(group) == 0  # which says nothing about the others, however long it goes on
        if flushed or NOT_SETTLED in told.work_seconds:
            trial.skip(group)
        if not flushed:
            trial.hear(group, told.updates[0], told.update_seconds[0])
        self._set(trial.depth)
        self.is_open = not trial.over

    def measure(
        self,
        status: RankStatus,
        pair_seconds: Callable[[], tuple[float, float]],
        last_update: Callable[[], tuple[int, float]] = lambda: (-1, 0.0),
    ) -> None:
        """Until the depth is chosen, what the others should know: a forward and backward at its best, and typically,
        the last update that is done and its time, and how many more there is memory for."""
        if not self.is_open:
            return
        if self.asks_for_room:
            status.room = self.room.microbatches()
        least, typical = pair_seconds()
        status.work_seconds = NOT_SETTLED if self._unsettled else least
        status.link_seconds, status.late_seconds = self.link_seconds, typical - least
        status.update, status.update_seconds = last_update()
        self._unsettled = max(0, self._unsettled - 1)

    def recording(self) -> None:
        """The forward that has just run was recorded, or will be from the next time on."""
        self._unsettled = 2  # its backward may come with the next group's
        self.room.in_pools = True

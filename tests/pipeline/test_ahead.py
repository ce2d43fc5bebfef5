"""A message over gloo sets out when its receive is posted: as many are posted as the stage before is ahead.

With fewer posted a link carries that many messages in each round trip, however many microbatches are in flight.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slipstream.errors import UserError
from slipstream.pipeline.depth import Depth
from slipstream.pipeline.links import Links
from slipstream.pipeline.messages import spec_of
from slipstream.pipeline.neighbours import Neighbour
from slipstream.schedule.asynchronous import warm_up_2bw
from slipstream.schedule.cutover import Cutover


class Counting:
    """An incoming end that has whatever is asked for, and counts what is posted."""

    def __init__(self) -> None:
        self.posted = 0
        self.seen: list[int] = []

    def post(self, spec) -> None:
        self.posted += 1

    def receive(self, what):
        self.seen.append(self.posted)
        self.posted -= 1
        return [torch.zeros(2)]


def received(m: int, lead: int) -> Counting:
    links = Links(
        SimpleNamespace(count=1), None, warm_up_behind=lambda: 0, lead=lambda: lead, timeout_seconds=1.0
    )
    links._activations_in, links._incoming = Counting(), spec_of([torch.zeros(2)])
    links._before = Neighbour(0, SimpleNamespace(rank=0, receive=lambda: None), 1.0)
    for group in range(2):
        for index in range(m):
            links.receive_activations(group, index, m - 1 - index)
    return links._activations_in


@pytest.mark.parametrize("lead", [1, 3, 20])
def test_a_receive_is_posted_for_all_that_may_be_on_its_way_in_the_group(lead):
    m = 8
    end = received(m, lead)
    assert end.seen == [min(lead + 1, m - index) for index in range(m)] * 2
    assert end.posted == 0  # between two groups an evaluation may come, with other shapes


@pytest.mark.parametrize(
    ("stages", "m", "in_flight"), [(2, 8, 2), (2, 8, 8), (4, 8, 4), (4, 16, 13), (3, 5, None)]
)
def test_the_lead_is_what_the_stage_before_runs_ahead(stages, m, in_flight):
    warm_up = warm_up_2bw(stages, m, in_flight)
    for stage in range(1, stages):
        depth = Depth(stage, stages, m, in_flight, False, Cutover(m, m, lambda group: False))
        assert depth.lead == warm_up[stage - 1] - warm_up[stage] >= 1


def test_no_slow_link_is_played_where_devices_wait(monkeypatch):
    monkeypatch.setattr(Links, "slow_seconds", 0.01)
    with pytest.raises(UserError, match="over NCCL"):
        Links(
            SimpleNamespace(count=2),
            SimpleNamespace(kind="nccl"),
            warm_up_behind=lambda: 0,
            lead=lambda: 1,
            timeout_seconds=1.0,
        )

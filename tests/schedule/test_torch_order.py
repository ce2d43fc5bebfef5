"""Our synchronous orders against the orders torch's own schedule classes execute."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from slipstream.schedule import build
from slipstream.schedule.actions import Kind, Schedule, from_csv, to_csv


def our_order(schedule: Schedule) -> list[list[str]]:
    return [
        [f"{a.stage}{a.kind.value}{a.microbatch}" for a in actions if a.kind is not Kind.UPDATE]
        for actions in schedule.ranks
    ]


def torch_schedule(cls: type, stages: int, microbatches: int, chunks: int):
    """A torch schedule over stages that only know their place."""
    local = [
        SimpleNamespace(
            num_stages=stages * chunks,
            group_size=stages,
            group_rank=0,
            stage_index=i,
            is_last=False,
            submod=None,
        )
        for i in range(chunks)
    ]
    return cls(local, microbatches)


def executed_order(schedule) -> list[list[str]]:
    """The compute actions of what torch's runtime walks through, fused pairs taken apart."""
    order = []
    for rank in sorted(schedule.pipeline_order_with_comms):
        row = []
        for action in schedule.pipeline_order_with_comms[rank]:
            if action.is_compute_op:
                row += [str(part) for part in action.sub_actions or (action,)]
        order.append(row)
    return order


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"),
    [
        (2, 2, 2),
        (2, 4, 3),
        (3, 6, 2),
        (4, 4, 2),
        (4, 8, 2),
        (4, 10, 2),
        (4, 3, 2),
        (4, 16, 4),
        (8, 16, 2),
        (1, 3, 2),
    ],
)
def test_interleaved_1f1b(stages: int, microbatches: int, chunks: int) -> None:
    theirs = torch_schedule(torch_schedules.ScheduleInterleaved1F1B, stages, microbatches, chunks)
    ours = build("interleaved_1f1b", stages, microbatches, chunks=chunks)
    assert our_order(ours) == executed_order(theirs)


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 1), (2, 2), (2, 5), (3, 4), (4, 4), (4, 7), (4, 16), (8, 15), (8, 24)]
)
def test_zbv(stages: int, microbatches: int) -> None:
    theirs = torch_schedule(torch_schedules.ScheduleZBVZeroBubble, stages, microbatches, 2)
    assert our_order(build("zbv", stages, microbatches)) == executed_order(theirs)


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 2), (2, 4), (2, 7), (3, 6), (3, 11), (4, 8), (4, 13), (8, 16), (8, 40)]
)
def test_dualpipev(stages: int, microbatches: int) -> None:
    theirs = torch_schedule(torch_schedules.ScheduleDualPipeV, stages, microbatches, 2)
    assert our_order(build("dualpipev", stages, microbatches)) == executed_order(theirs)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 2), (2, 8), (4, 4), (4, 12), (8, 16)])
def test_zb_h1(stages: int, microbatches: int) -> None:
    """Torch's interleaved zero-bubble class with one stage per rank is ZB-H1."""
    theirs = torch_schedule(torch_schedules.ScheduleInterleavedZeroBubble, stages, microbatches, 1)
    assert our_order(build("zb_h1", stages, microbatches)) == executed_order(theirs)


class RecordingStage:
    """Stands in for a PipelineStage: computes and sends nothing, writes down what it is told to do."""

    def __init__(self, index: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward = True
        self.calls: list[str] = []

    def forward_one_chunk(self, chunk: int, *args, **kwargs) -> torch.Tensor:
        self.calls.append(f"{self.stage_index}F{chunk}")
        return torch.zeros(1)

    def backward_one_chunk(self, chunk: int, **kwargs) -> None:
        self.calls.append(f"{self.stage_index}B{chunk}")

    def no_messages(self, chunk: int) -> list:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def perform_reduce_grad(self, scale: int) -> None:
        pass

    def release_fwd_send_outputs(self, chunk: int) -> None:
        """Called since torch 2.15."""


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 1), (1, 4), (2, 2), (2, 5), (4, 4), (4, 9), (8, 8), (8, 20)]
)
@pytest.mark.parametrize(("name", "cls"), [("1f1b", "Schedule1F1B"), ("gpipe", "ScheduleGPipe")])
def test_single_stage_schedules_as_executed(
    name: str, cls: str, stages: int, microbatches: int, monkeypatch
) -> None:
    """What torch does, not what it publishes: its 1F1B order is wrong on the last rank."""
    base = torch_schedules.PipelineScheduleSingle
    monkeypatch.setattr(base, "_initialize_stage", lambda self, *args, **kwargs: None)
    executed = []
    for index in range(stages):
        stage = RecordingStage(index, stages)
        schedule = getattr(torch_schedules, cls)(
            stage, microbatches, loss_fn=lambda output, target: output.sum()
        )
        targets = [torch.zeros(1)] * microbatches
        schedule._step_microbatches([(torch.zeros(1),)] * microbatches, [{}] * microbatches, targets, [])
        executed.append(stage.calls)
    assert our_order(build(name, stages, microbatches)) == executed


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8)])
def test_torch_reads_our_csv(name: str, stages: int, microbatches: int, tmp_path: Path) -> None:
    schedule = build(name, stages, microbatches, groups=2)
    path = tmp_path / f"{name}.csv"
    path.write_text(to_csv(schedule))
    runtime = torch_schedule(torch_schedules._PipelineScheduleRuntime, stages, microbatches, schedule.chunks)
    runtime._load_csv(str(path), format="compute_only")
    assert executed_order(runtime) == our_order(build(name, stages, microbatches))
    assert runtime.stage_index_to_group_rank == schedule.placement()


def test_we_read_torch_csv(tmp_path: Path) -> None:
    """DualPipeV as torch dumps it, fused pairs and idle slots included, is our DualPipeV."""
    theirs = torch_schedule(torch_schedules.ScheduleDualPipeV, 4, 10, 2)
    path = tmp_path / "dualpipev.csv"
    theirs._dump_csv(str(path), format="compute_only")
    assert from_csv(path.read_text(), "dualpipev") == build("dualpipev", 4, 10)

"""The longest kernels and the gaps between them: laws on made-up traces."""

from __future__ import annotations

import pytest

from slipstream.metrics.kernels import gaps, longest, pieces


def event(name, start, length, cat="kernel", tid=7):
    """In microseconds, as in a trace."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": start, "dur": length, "args": {}}


def trace(*events):
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}


def test_kernels_are_added_up_by_name_and_the_longest_come_first():
    found = pieces(
        trace(
            event("gemm", 100, 4000),
            event("sum", 0, 50),
            event("gemm", 5000, 2000),
            event("copy", 60, 10, cat="gpu_memcpy"),
            event("aten::mm", 0, 9000, cat="cpu_op"),  # a kernel's launch is no kernel
        )
    )
    assert longest(found, updates=2) == [
        {"name": "gemm", "ms": 3.0, "count": 1.0},
        {"name": "sum", "ms": 0.025, "count": 0.5},
        {"name": "copy", "ms": 0.005, "count": 0.5},
    ]
    assert longest(found, most=1) == [{"name": "gemm", "ms": 6.0, "count": 2}]
    assert len(longest(pieces(trace(event("x" * 500, 0, 1))))[0]["name"]) == 120


def test_a_gap_is_where_no_stream_runs_anything():
    found = pieces(
        trace(
            event("long", 0, 100),
            event("beside it", 10, 20, tid=8),
            event("first after", 130, 10),
            event("touches", 140, 5),
            event("last", 146.5, 1),
        )
    )
    told = gaps(found)
    assert told["longest"] == [
        {"ms": 0.030, "at_ms": 0.1, "after": "long", "before": "first after"},
        {"ms": 0.0015, "at_ms": 0.145, "after": "touches", "before": "last"},
    ]
    assert gaps(found, most=1)["longest"] == told["longest"][:1]
    counted = {row["from_us"]: (row["count"], row["ms"]) for row in told["by_length"] if row["count"]}
    assert counted == {1: (1, pytest.approx(0.0015)), 16: (1, pytest.approx(0.030))}


def test_kernels_and_gaps_make_up_the_span():
    found = pieces(trace(*(event(str(k), 7 * k, 1 + k % 6) for k in range(50))))
    told = gaps(found, updates=2)
    busy = sum(row["ms"] for row in longest(found, updates=2, most=50))
    idle = sum(row["ms"] for row in told["by_length"])
    assert busy + idle == pytest.approx((found[-1].end - found[0].start) / 1e3 / 2)
    assert sum(row["count"] for row in told["by_length"]) == 49 / 2


def test_without_a_gpu_the_outermost_operations_of_the_busiest_thread_count():
    found = pieces(
        trace(
            event("layer", 0, 10, cat="cpu_op", tid=1),
            event("inside", 2, 3, cat="cpu_op", tid=1),
            event("update", 12, 10, cat="user_annotation", tid=1),
            event("reader", 0, 5, cat="cpu_op", tid=2),
        )
    )
    assert [piece.name for piece in found] == ["layer", "update"]


def test_nothing_recorded_is_nothing():
    found = pieces(trace())
    assert longest(found) == []
    assert gaps(found)["longest"] == []
    assert all(row["count"] == 0 for row in gaps(found)["by_length"])

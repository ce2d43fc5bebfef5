"""A timeline as a trace for Perfetto or chrome://tracing: one process per timeline, one track per rank."""

from __future__ import annotations

import json
from collections.abc import Mapping

from slipstream.schedule.plot.palette import WORDS
from slipstream.schedule.timeline import Timeline


def to_trace(timelines: Mapping[str, Timeline]) -> str:
    """Trace Event JSON; one unit of time is taken as a second."""
    events: list[dict] = []
    for process, (title, timeline) in enumerate(timelines.items()):
        events.append(_name("process_name", process, 0, title))
        events += [_name("thread_name", process, rank, f"rank {rank}") for rank in range(len(timeline.ranks))]
        begin = timeline.begin
        for rank, action, start, end in timeline.spans:
            arguments = {
                "stage": action.stage,
                "microbatch": action.microbatch,
                "group": action.group,
                "version": action.version,
            }
            events.append(
                {
                    "name": str(action),
                    "cat": WORDS[action.kind],
                    "ph": "X",
                    "ts": (start - begin) * 1e6,
                    "dur": (end - start) * 1e6,
                    "pid": process,
                    "tid": rank,
                    "args": arguments,
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(kind: str, process: int, thread: int, name: str) -> dict:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}

"""Figures of the real device: seconds of every part's forward, backward and update, and of the link.

Parts are timed at two microbatch sizes, which gives the overhead per call and the time per sequence; the link
is timed with messages of several sizes, which gives latency and bandwidth; a runtime is timed on stages that do
almost nothing, which gives what it costs beside them. What is timed is handed in as
callables, so this layer needs neither models nor process groups of its own; torch is imported when used.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, linear_regression, median, variance
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.errors import UserError
from slipstream.formats import parse_json
from slipstream.models.sizes import ModelConfig
from slipstream.plan.devices import FREE, Runtime
from slipstream.plan.parts import Timing
from slipstream.schedule.actions import Kind
from slipstream.schedule.costs import Costs
from slipstream.schedule.generate import build
from slipstream.schedule.simulate import simulate

if TYPE_CHECKING:
    from torch import Tensor, nn

PARTS = ("embedding", "layer", "head")
SIZES = (1, 3)
REPEATS = 7
MESSAGE_BYTES = (4, 2**16, 2**20, 2**22)
LONGEST_SECONDS = 1e9


@dataclass(frozen=True)
class Link:
    latency: float  # seconds, one way
    bandwidth: float  # bytes per second


@dataclass(frozen=True)
class Measured:
    """What the parts that were timed are parts of. How many layers a model has makes no difference to one."""

    widths: str
    sequence: int
    optimizer: str

    @classmethod
    def of(cls, config: ModelConfig, sequence: int, optimizer: str) -> Measured:
        names = ("vocab", "dim", "heads", "kv_heads", "ffn", "experts", "experts_per_token")
        return cls(", ".join(f"{name} {getattr(config, name)}" for name in names), sequence, optimizer)

    def __str__(self) -> str:
        return f"{self.widths}, sequence {self.sequence}, {self.optimizer}"


@dataclass(frozen=True)
class Profile:
    """What was measured, where. `timings` has "embedding", "layer" and "head"."""

    measured: Measured
    device: str
    memory_bytes: float
    timings: dict[str, Timing]
    link: Link
    engine: Runtime = FREE
    torch_engine: Runtime = FREE

    def device_changes(self) -> dict[str, Any]:
        """The fields of a `Device` that the measurement replaces."""
        return {
            "name": self.device,
            "memory_bytes": self.memory_bytes,
            "intra_latency": self.link.latency,
            "intra_bandwidth": self.link.bandwidth,
            "inter_latency": self.link.latency,
            "inter_bandwidth": self.link.bandwidth,
            "engine": self.engine,
            "torch_engine": self.torch_engine,
            "source": "measured",
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")

    @classmethod
    def read(cls, path: Path, wanted: Measured) -> Profile:
        """The profile at `path`, which must be one of what is `wanted`."""
        try:
            tree = parse_json(path.read_text(encoding="utf-8"))
            measured = Measured(**tree["measured"])
            timings = {name: Timing(**_seconds(tree["timings"][name])) for name in PARTS}
            runtimes = [Runtime(**_seconds(tree.get(name, {}))) for name in ("engine", "torch_engine")]
            found = cls(
                measured, tree["device"], tree["memory_bytes"], timings, Link(**tree["link"]), *runtimes
            )
        except OSError as error:
            reason = error.strerror
            raise UserError(
                f"The profile {path} cannot be read: {reason}. Measure one with --profile."
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a profile ({error}). Measure one with --profile.") from None
        if measured != wanted:
            raise UserError(
                f"The profile {path} is one of {measured}, and this plan is of "
                f"{wanted}. Measure one for it with --profile."
            )
        return found


def _seconds(figures: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in figures.items():
        if value is not None and not 0 <= value < LONGEST_SECONDS:
            raise ValueError(f"{name} is no time that was measured")
    return figures


class StageSeconds(NamedTuple):
    """Means: what counts in a run is the sum.

    `jitter` is the relative standard deviation of one duration within its group, `drift` that of a whole group.
    """

    forward: float
    backward: float
    update: float
    jitter: float = 0.0
    drift: float = 0.0


def time_stage(
    module: nn.Module,
    inputs: Tensor,
    update: Callable[[], object],
    loss: Callable[[Tensor], Tensor] | None = None,
    order: Sequence[Kind] = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE) * REPEATS,
    *,
    first: bool = False,
    average: Callable[[Sequence[float]], float] = fmean,
) -> StageSeconds:
    """Averages of a stage's forward (with its loss, if it has one), backward and update, run in this `order`.

    In the order of a schedule's rank activations leave the caches as they do in a run. The first group is not
    counted. The `first` stage passes no gradient to its input.
    """
    import torch

    on_gpu = inputs.is_cuda

    def clock() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    rows: dict[Kind, list[float]] = {Kind.FORWARD: [], Kind.BACKWARD: [], Kind.UPDATE: []}
    groups: list[list[tuple[Kind, float]]] = [[]]  # forwards and backwards between updates
    waiting: deque[Tensor] = deque()
    for kind in order:
        if kind is Kind.FORWARD:
            fed = inputs.detach().clone()
            fed.requires_grad_(inputs.is_floating_point() and not first)
            began = clock()
            result = module(fed)
            waiting.append(loss(result) if loss is not None else result)
        elif kind is Kind.BACKWARD:
            oldest = waiting.popleft()
            gradient = torch.ones_like(oldest)
            began = clock()
            oldest.backward(gradient)
            del oldest
        else:
            began = clock()
            update()
        rows[kind].append(clock() - began)
        if kind is Kind.UPDATE:
            groups.append([])
        else:
            groups[-1].append((kind, rows[kind][-1]))
    warm = order.index(Kind.UPDATE)
    skipped = {kind: order[: warm + 1].count(kind) for kind in rows}
    forwards, backwards, updates = (rows[kind][skipped[kind] :] for kind in rows)
    means = {Kind.FORWARD: fmean(forwards), Kind.BACKWARD: fmean(backwards)}
    relative = [[seconds / means[kind] for kind, seconds in group] for group in groups[1:] if group]
    return StageSeconds(average(forwards), average(backwards), average(updates), *spreads(relative))


def spreads(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The standard deviation within groups, and the one between their means that is more than chance would give."""
    within = fmean(variance(group) for group in groups if len(group) > 1)
    size = fmean(len(group) for group in groups)
    between = variance([fmean(group) for group in groups]) - within / size if len(groups) > 1 else 0.0
    return sqrt(within), sqrt(max(0.0, between))


def fit_runtime(
    schedule: str, stages: int, bare: Mapping[int, Costs], periods: Mapping[int, float]
) -> Runtime:
    """What a runtime adds, from its `periods` on almost empty stages at two numbers of microbatches.

    `bare` are the costs of those stages and links alone. The overhead per action is the one with which the
    simulator has the measured time per microbatch; what then is left of an update is the update's.
    """
    few, many = sorted(periods)

    def period(microbatches: int, overhead: float) -> float:
        given = replace(bare[microbatches], overhead=overhead)
        return simulate(build(schedule, stages, microbatches, 6), given).time_per_update

    wanted = periods[many] - periods[few]
    low, high = 0.0, max(wanted, 0.0) / (many - few)
    for _ in range(30):
        middle = (low + high) / 2
        if period(many, middle) - period(few, middle) < wanted:
            low = middle
        else:
            high = middle
    left = max(0.0, periods[few] - period(few, low))
    return Runtime(low, left, on_demand=bare[few].on_demand)


def fit_line(points: Mapping[float, float]) -> tuple[float, float]:
    """Least squares of y = a + b x with a, b >= 0: what a call costs, and what a unit costs."""
    xs, ys = list(points), list(points.values())
    slope, intercept = linear_regression(xs, ys)
    if slope < 0.0:
        return fmean(ys), 0.0
    if intercept < 0.0:  # through the origin instead
        return 0.0, linear_regression(xs, ys, proportional=True).slope
    return intercept, slope


def timing(measured: Mapping[int, StageSeconds]) -> Timing:
    """Per-call and per-sequence seconds from measurements at several microbatch sizes."""
    forward = fit_line({float(size): seconds.forward for size, seconds in measured.items()})
    backward = fit_line({float(size): seconds.backward for size, seconds in measured.items()})
    return Timing(*forward, *backward, update=min(seconds.update for seconds in measured.values()))


def link(points: Mapping[float, float]) -> Link:
    """Latency and bandwidth from one-way times of messages."""
    latency, per_byte = fit_line(points)
    return Link(latency or min(points.values()), 1.0 / per_byte if per_byte else 1e12)


def ping_pong(world: Any, sizes: Sequence[int] = MESSAGE_BYTES, repeats: int = 20) -> dict[float, float]:
    """On two ranks: seconds one way per message size, the median of there and back."""
    import torch
    import torch.distributed as dist

    times: dict[float, float] = {}
    for size in sizes:
        message = torch.zeros(size, dtype=torch.uint8)
        laps = []
        for _ in range(repeats + 3):
            dist.barrier()
            began = time.perf_counter()
            for sender in (0, 1):
                if world.rank == sender:
                    dist.send(message, 1 - sender)
                else:
                    dist.recv(message, sender)
            laps.append((time.perf_counter() - began) / 2)
        times[float(size)] = median(laps[3:])
    return times

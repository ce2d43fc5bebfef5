"""What a plan is made of: the job that was given, a layout with its predicted figures, the ranked result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import UserError
from slipstream.models.cut import Layers
from slipstream.models.sizes import ModelConfig, active_parameters
from slipstream.plan.devices import Cluster
from slipstream.plan.memory import BF16, Precision, StageMemory
from slipstream.plan.parts import Timing
from slipstream.plan.penalty import Penalty, load_penalties
from slipstream.plan.price import Price
from slipstream.plan.start import Start, mean_seconds
from slipstream.plan.throughput import Shape, Speed, StageTimes


@dataclass(frozen=True)
class ModelSettings:
    """How a run trains the model of a plan: its `[model]`, where that is not the preset or the shape key by key, and in
    what that differs from the description the shape was read from."""

    values: dict[str, Any] | None = None
    differs: str = ""

    @property
    def whole_layers(self) -> bool:
        """Whether no stage can begin inside a layer, since layers are transformers' own."""
        return "hf" in (self.values or {})


@dataclass(frozen=True)
class Job:
    """What is to be trained, on what, and what the user has already decided (None: search)."""

    config: ModelConfig
    cluster: Cluster
    batch_tokens: int
    sequence: int
    optimizer: str = "muon"
    correction: str = "error_feedback"
    precision: Precision = BF16
    tokens: float | None = None  # budget; 20 per active parameter by default
    schedule: str | None = None
    stages: int | None = None
    microbatches: int | None = None
    microbatch_size: int | None = None  # sequences, over all data ranks, as pipeline.microbatch_size
    penalties: tuple[Penalty, ...] = field(default_factory=load_penalties)
    timings: dict[str, Timing] | None = None
    model: ModelSettings = field(default_factory=ModelSettings)

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.batch_tokens < self.sequence or self.batch_tokens % self.sequence:
            # A sequence for each device: those can always share it.
            shared = max(1, self.sequence) * self.cluster.devices
            near = max(1, round(self.batch_tokens / shared)) * shared
            raise UserError(
                f"A batch of {self.batch_tokens:,} tokens is not a whole number of sequences of "
                f"{self.sequence:,}. The nearest that works is --batch-tokens {near}."
            )

    @property
    def sequences(self) -> int:
        return self.batch_tokens // self.sequence

    @property
    def training_tokens(self) -> float:
        return self.tokens or 20.0 * active_parameters(self.config)


@dataclass(frozen=True)
class Layout:
    """One way to train, with all that is predicted about it."""

    shape: Shape
    cut: tuple[Layers, ...]  # layers of each model stage
    memory: tuple[StageMemory, ...]  # per rank
    times: StageTimes
    speed: Speed  # after the start, if there is one
    tokens_per_second: float  # of the whole run
    mfu: float
    penalty: float
    start: Start | None = None

    @property
    def mean_seconds(self) -> float:
        """Per update of the whole run."""
        return mean_seconds(self.start, self.speed.seconds)

    @property
    def score(self) -> float:
        """Tokens of synchronous training per second: what time to loss is made of."""
        return self.tokens_per_second / self.penalty

    @property
    def delay(self) -> int:
        """Updates by which the oldest gradient is late; a share `shape.old` of them is."""
        return 1 if self.shape.asynchronous else 0

    @property
    def memory_bytes(self) -> float:
        return max(stage.total for stage in self.memory)


@dataclass(frozen=True)
class Plan:
    """Ranked layouts, best first, with what delay costs in tokens and the size of the search."""

    job: Job
    layouts: tuple[Layout, ...]
    price: Price | None  # None where only a synchronous schedule was asked for
    considered: int
    fitting: int

    @property
    def best(self) -> Layout:
        return self.layouts[0]

    @property
    def best_synchronous(self) -> Layout | None:
        return next((layout for layout in self.layouts if not layout.shape.asynchronous), None)

    @property
    def best_asynchronous(self) -> Layout | None:
        return next((layout for layout in self.layouts if layout.shape.asynchronous), None)

    def net_gain(self, layout: Layout) -> float | None:
        """Time to loss of the best synchronous layout over that of `layout`."""
        best = self.best_synchronous
        return layout.score / best.score if best else None


RUNNABLE = {  # planner's name -> pipeline.schedule
    "pipedream_2bw": "2bw", "1f1b": "1f1b", "gpipe": "gpipe", "interleaved_1f1b": "interleaved_1f1b",
    "zbv": "zbv",
}  # fmt: skip


def why_not(job: Job, shape: Shape) -> str:
    """Why `slipstream train` does not do this; nothing where it does."""
    if shape.schedule not in RUNNABLE:
        return f"there is no {shape.schedule}"
    if shape.schedule == "zbv" and job.config.experts:
        return "zbv trains no experts"
    if shape.shard_optimizer and not shape.asynchronous:
        return "the optimizer is sharded under 2bw only"
    if job.precision.gradient == 2 and not shape.asynchronous:
        return "sums of gradients are in bf16 under 2bw only"
    if shape.chunks > 1 and shape.microbatches % shape.stages:
        return f"{shape.schedule} takes whole rounds of P microbatches"
    if not shape.pipeline_inside:
        return "the stages of a pipeline are neighbours, not spread over nodes"
    return ""


def describe(shape: Shape) -> str:
    """A layout in words."""
    words = [shape.schedule, f"P={shape.stages}", f"D={shape.data_ranks}", f"m={shape.microbatches}"]
    words.append(f"{shape.microbatch_size} sequence{'s' if shape.microbatch_size > 1 else ''} each")
    if shape.checkpointing:
        words.append("activation checkpointing")
    if shape.shard_optimizer:
        words.append("sharded optimizer")
    if not shape.pipeline_inside:
        words.append("stages spread over nodes")
    if shape.in_flight:
        words.append(f"{shape.in_flight} in flight")
    if shape.cutover is not None:
        words.append(f"cutover {shape.cutover}")
    return ", ".join(words)

"""The whole run as one frozen, typed tree. Invariant: a key is declared once, here, with its meaning.

Every field carries a `Reach`: whether changing it on an existing run would change the trajectory (refused on
resume), only the layout (how the same numbers are computed), or nothing but what is written down.
A field that is None here is derived in `resolve.py`; the resolved tree is what the run folder keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

ScheduleName = Literal["2bw", "1f1b", "gpipe", "interleaved_1f1b", "zbv", "emulate"]
SYNCHRONOUS = ("1f1b", "gpipe", "interleaved_1f1b", "zbv")
TWO_CHUNK = ("interleaved_1f1b", "zbv")  # schedules that hold two stage modules per rank


class Reach(StrEnum):
    """What a change of a key does to a run that already has a checkpoint."""

    TRAJECTORY = "trajectory"  # other weights: refused
    LAYOUT = "layout"  # the same weights, computed elsewhere or otherwise: allowed
    OUTPUT = "output"  # what is logged, kept or checked: allowed


def _field(default: Any, meaning: str, *, reach: Reach = Reach.TRAJECTORY, **limits: Any) -> Any:
    return Field(default, description=meaning, json_schema_extra={"reach": reach.value}, **limits)


def _layout(default: Any, meaning: str, **limits: Any) -> Any:
    return _field(default, meaning, reach=Reach.LAYOUT, **limits)


def _output(default: Any, meaning: str, **limits: Any) -> Any:
    return _field(default, meaning, reach=Reach.OUTPUT, **limits)


def _listed(value: Any) -> Any:
    """`train.trackers=tensorboard` and `=tensorboard,wandb` mean what `=["tensorboard", "wandb"]` does."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


def updates(value: float, steps: int) -> int:
    """A number of updates: below 1 it is a share of the steps."""
    return round(value * steps) if value < 1 else int(value)


def _is_number(annotation: Any) -> bool:
    """Whether it, a kind in it or what its lists hold is a number, and nothing of it is true or false."""
    parts = get_args(annotation)
    return bool not in parts and (annotation in (int, float) or any(map(_is_number, parts)))


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes true for 1."""
        given = value if isinstance(value, list | tuple) else [value]
        wanted = cls.model_fields[str(info.field_name)].annotation
        if any(isinstance(one, bool) for one in given) and _is_number(wanted):
            raise PydanticCustomError("number", "a number is wanted here, neither true nor false")
        return value


class RunSettings(Settings):
    dir: str = _output("runs/default", "folder of the run; one that holds a checkpoint is resumed")
    fork_from: str | None = _field(None, "run or checkpoint folder whose state starts this new run")
    name: str | None = _output(None, "name of the run for trackers and lists (derived: its folder's)")
    tags: Annotated[list[str], BeforeValidator(_listed)] = _output(
        [], "words to find the run by, for trackers and `slipstream runs`"
    )
    switch: bool = _output(False, "allow a resumed run to change between 2bw and a synchronous schedule")


class ModelSettings(Settings):
    preset: str = _field("cpu-default", "named size; the keys below override single values of it")
    module: str | None = _field(
        None, "your own model, MODULE:NAME: a function of the vocabulary size that returns its layers"
    )
    hf: str | None = _field(
        None, "a model class of transformers by its config.json, or a folder that has one; cut by layers"
    )
    init_from: str | None = _field(None, "Hugging Face folder to start from (name optim.name explicitly)")
    vocab: int | None = _field(None, "vocabulary size (derived: the data's, or the preset's)", ge=1)
    dim: int | None = _field(None, "width of the residual stream (derived: the preset's)", ge=1)
    layers: int | None = _field(None, "number of layers (derived: the preset's)", ge=1)
    heads: int | None = _field(None, "attention heads (derived: the preset's)", ge=1)
    kv_heads: int | None = _field(None, "key and value heads (derived: the preset's)", ge=1)
    head_width: int | None = _field(None, "width of one head (derived: the preset's, or dim / heads)", ge=2)
    ffn: int | None = _field(None, "hidden width of the MLP (derived: the preset's)", ge=1)
    tied: bool | None = _field(None, "embedding and head share weights (derived: the preset's)")
    qk_norm: bool | None = _field(None, "RMSNorm on queries and keys (derived: the preset's)")
    rope_theta: float | None = _field(None, "base of the rotary embedding (derived: the preset's)", gt=0)
    norm_eps: float | None = _field(None, "epsilon of RMSNorm (derived: the preset's)", gt=0)
    experts: int | None = _field(None, "experts per layer, 0: dense (derived: the preset's)", ge=0)
    experts_per_token: int | None = _field(None, "experts a token visits (derived: the preset's)", ge=0)
    balance_loss: float | None = _field(
        None, "weight of the load-balancing loss (derived: the preset's)", ge=0
    )
    router_z_loss: float | None = _field(None, "weight of the router's z-loss (derived: the preset's)", ge=0)


class DataSettings(Settings):
    path: str | None = _field(None, "folder of token shards; none: the embedded standard-library corpus")
    module: str | None = _field(
        None,
        "your own data, MODULE:NAME: a function of split, rows, sequence and seed that returns batch(group)",
    )
    sequence: int = _field(128, "tokens per sequence", ge=2)
    mask_documents: bool = _field(False, "attention stays inside a document, and no loss across its end")


class PipelineSettings(Settings):
    schedule: ScheduleName = _field("2bw", "2bw, emulate (one process), or torch's synchronous schedules")
    stages: int | None = _layout(None, "pipeline stages (derived: 2; 1 for emulate; torchrun's ranks)", ge=1)
    microbatches: int = _field(8, "microbatches per update, m; never derived from the stages", ge=1)
    microbatch_size: int = _field(2, "sequences per microbatch, over all data ranks", ge=1)
    in_flight: int | None = _layout(
        None, "microbatches stage 0 keeps in flight, 2bw only (derived: measured in the first updates)", ge=1
    )
    boundaries: list[int | float] | None = _layout(
        None,
        "first layer of each stage but the first; 2.5: inside layer 2, behind its attention (derived: balanced cost)",
    )
    delay: int | list[int] = _field(
        1, "updates between reading and using weights; other than 1: emulate only"
    )
    cutover: int | float | list[int] | None = _field(
        None,
        "microbatches of an update that read old weights, the others read the newest; below 1: a share of them; a list "
        "by stage: emulate only (derived when a run is made: stages + 1; on processors 2 stages - 3, if that is more; "
        "of one stage 1; emulate: all)",
    )
    fine_start: float = _field(
        0.0,
        "updates at the start that are cut finer, so that a smaller part of each is old; below 1: a share of "
        "train.steps",
        ge=0,
    )
    fine_microbatches: int | None = _field(
        None,
        "microbatches per update in the fine start (derived: four of each, if its sequences allow)",
        ge=2,
    )
    mismatch: int | list[int] = _field(
        0, "updates by which a backward's weights are newer than its forward's (no stashing); emulate only"
    )
    data_ranks: int = _layout(1, "data-parallel ranks per stage; they share each microbatch's rows", ge=1)
    shard_optimizer: bool = _layout(False, "each data rank owns the master and state of whole matrices")
    elastic: bool = _layout(
        False, "go on with fewer stages when ranks are lost, and with all of them when they are back"
    )
    least_stages: int = _layout(1, "the fewest stages an elastic run goes on with", ge=1)
    return_seconds: float = _layout(
        60.0, "elastic: time between looks whether a place that was lost is back", gt=0
    )
    partitions: bool = _layout(
        False, "give each rank its own share of one GPU's multiprocessors, by CUDA MPS"
    )

    @property
    def most_microbatches(self) -> int:
        """Of any update: a fine start has more of them."""
        return max(self.microbatches, self.fine_microbatches or 0) if self.fine_start else self.microbatches


class OptimSettings(Settings):
    name: str = _field(
        "muon", "optimizer: muon, adamw, soap, adan, lion, ... (matrices; the rest take AdamW)"
    )
    lr: float | None = _field(
        None, "peak learning rate (derived: the preset's tuned one, or the optimizer's)", gt=0
    )
    adamw_lr: float | None = _field(
        None, "peak learning rate of the tensors Muon leaves to AdamW (derived: the optimizer's rule)", gt=0
    )
    weight_decay: float | None = _field(None, "decoupled weight decay (derived: the optimizer's)", ge=0)
    betas: list[float] | None = _field(None, "moment decay rates (derived: the optimizer's)")
    momentum: float | None = _field(None, "momentum (derived: the optimizer's)", ge=0, lt=1)
    options: dict[str, Any] = _field({}, "further options handed to the optimizer as they are")
    correction: str | None = _field(
        None,
        "what is done about delay: error_feedback, none, momentum_prediction, delay_compensation, lr_scaling "
        "(derived: error_feedback where there is a delay; none for lion)",
    )
    correction_lambda: float | None = _field(
        None, "strength of the correction (derived: its own default)", ge=0
    )
    sync_start: float = _field(0.0, "flushed updates at the start; below 1: a share of train.steps", ge=0)
    sync_finish: float = _field(0.0, "flushed updates at the end; below 1: a share of train.steps", ge=0)
    schedule: Literal["cosine", "wsd", "constant"] = _field("cosine", "shape of the learning rate")
    warmup: float = _field(0.1, "warm-up updates; below 1: a share of train.steps", ge=0)
    floor: float | None = _field(
        None, "learning rate at the end, as a share of the peak (derived: 0.1; 0 for constant)", ge=0, le=1
    )
    max_grad_norm: float = _field(1.0, "exact clipping over all stages; 0: off", ge=0)

    @property
    def given(self) -> dict[str, Any]:
        """The optimizer's options; None: its default."""
        own = ("lr", "weight_decay", "adamw_lr", "betas", "momentum")
        return {key: getattr(self, key) for key in own} | self.options


class TrainSettings(Settings):
    steps: int = _field(400, "optimizer updates", ge=1)
    seed: int = _field(0, "seed of the weights and of the data order", ge=0)
    device: Literal["auto", "cpu", "cuda"] = _layout("auto", "auto: a GPU where there is one")
    dtype: Literal["float32", "bfloat16", "bfloat16_autocast"] = _field(
        "float32", "float32; bfloat16 banks over a float32 master; float32 weights under bfloat16 autocast"
    )
    gradient_dtype: Literal["bfloat16"] | None = _field(
        None,
        "bfloat16: sums of gradients at half the size, rounded at random, for models that would not fit",
    )
    fp8: Literal["tensorwise", "rowwise"] | None = _field(
        None,
        "products of hidden matrices in fp8, by torchao: operands scaled as a whole, or by row (more exact, slower); "
        "emulated on a CPU",
    )
    compile: bool | Literal["layers", "stage"] = _layout(
        False, "torch.compile every replica: each layer, the whole stage, or (true) what suits its depth"
    )
    cuda_graphs: bool = _layout(
        False,
        "on GPUs: forward and backward of a microbatch as one launch each, for models bound by the host",
    )
    fuse: bool = _layout(
        False,
        "emulate: microbatches that read the same weights are computed as one, which is quicker and equal to rounding",
    )
    attention: Literal["auto", "cudnn", "flash"] = _layout(
        "auto", "attention kernel on a GPU to try first; auto: as torch orders them"
    )
    deterministic: bool = _layout(
        False, "on GPUs: only kernels that give the same bits every time, which are slower; a CPU always does"
    )
    chunked_loss: bool = _layout(
        False, "logits are made and differentiated some rows at a time: less memory, equal to rounding"
    )
    activation_checkpointing: bool = _layout(False, "recompute each layer's activations in the backward")
    z_loss: float = _field(0.0, "weight of the squared log-partition penalty", ge=0)
    timeout_seconds: float = _layout(600.0, "how long a stage waits for another before it names it", gt=0)
    restarts: int | None = _layout(
        None,
        "times the launcher starts ranks again after a lost one, without a newer checkpoint in between (derived: 0; "
        "elastic: 3)",
        ge=0,
    )
    disk_seconds: float = _layout(60.0, "how long a full disk is tried again before it is an error", ge=0)
    log_every: int | None = _output(
        None,
        "steps between lines where output is no terminal (derived: a line every few seconds); every step is in "
        "events.jsonl all the same",
        ge=1,
    )
    eval_every: int = _output(100, "steps between validations; 0: only at the end", ge=0)
    eval_batches: int = _output(8, "update-sized batches per validation", ge=1)
    sample_prompt: str | None = _output(
        None, "prompt of the sample at the end (derived: how the validation text begins)"
    )
    sample_tokens: int = _output(0, "tokens of a text that the model writes at the end; 0: none", ge=0)
    report: bool = _output(True, "write report.html at the end")
    timeline_at: int = _output(20, "record the timeline of three groups after this step; 0: never", ge=0)
    trackers: Annotated[list[Literal["tensorboard", "wandb"]], BeforeValidator(_listed)] = _output(
        [], "also log to tensorboard or wandb; by commas or as a list"
    )
    callback: str | None = _output(
        None,
        "your own function, MODULE:NAME, called on rank 0 with every update's event; true from it stops the run",
    )
    patience: int = _output(0, "validations in a row without a better loss that end the run; 0: off", ge=0)
    profile: int = _output(
        0, "record a torch profiler trace of three updates after this step, one file per rank; 0: never", ge=0
    )
    quiet: bool = _output(False, "print only warnings, errors and the last line; also `train --quiet`")


class CheckpointSettings(Settings):
    every: int = _output(100, "steps between checkpoints; 0: only at the end (derived: 0 if keep = 0)", ge=0)
    memory_every: int = _output(
        0, "steps between checkpoints in the machine's memory, for ranks that are lost; 0: none", ge=0
    )
    keep: int = _output(2, "finished checkpoints kept; 0: none is written, nor a sample made", ge=0)
    best: bool = _output(
        False, "also keep the state with the lowest validation loss, saved when it is validated"
    )
    remote: str | None = _output(
        None, "a URL (s3://, gs://, file:///...) that gets a copy of every checkpoint, and is resumed from"
    )


class HealthSettings(Settings):
    hash_every: int = _output(100, "steps between hashes of replicas, tied weights and banks; 0: never", ge=0)
    spike: float = _output(
        6.0, "warn when a loss is this many deviations above its recent mean; 0: off", ge=0
    )
    max_skipped: int = _output(5, "non-finite updates in a row that count as a failure; 0: no limit", ge=0)
    rollback: bool = _output(False, "on a failure return to the last checkpoint and skip the data since then")


class Config(Settings):
    """One run. Sections are frozen; `changed` or overrides make another one."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    pipeline: PipelineSettings = PipelineSettings()
    optim: OptimSettings = OptimSettings()
    train: TrainSettings = TrainSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    health: HealthSettings = HealthSettings()

    def changed(self, **sections: Mapping[str, Any]) -> Config:
        """With other values, by section: `changed(train={"steps": 3})`."""
        return self.model_copy(
            update={name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        )

    @property
    def synchronous(self) -> bool:
        """True when torch's own flushed schedules drive the run."""
        return self.pipeline.schedule in SYNCHRONOUS

    @property
    def stages(self) -> int:
        """Pipeline stages of a resolved run."""
        assert self.pipeline.stages is not None
        return self.pipeline.stages

    @property
    def ranks(self) -> int:
        """Processes of a resolved run."""
        return self.stages * self.pipeline.data_ranks

    @property
    def chunks(self) -> int:
        """Stage modules per rank."""
        return 2 if self.pipeline.schedule in TWO_CHUNK else 1

    @property
    def late(self) -> bool:
        """Whether any gradient is of older weights."""
        return not self.synchronous and self.pipeline.delay not in (0, [0])

    @property
    def uneven(self) -> bool:
        """Whether stages read weights of different ages."""
        given = (self.pipeline.delay, self.pipeline.cutover, self.pipeline.mismatch)
        return any(isinstance(value, list) for value in given)

    @property
    def own_model(self) -> bool:
        """The user's, or transformers': its shape is not ours to set."""
        return self.model.module is not None or self.model.hf is not None

    @property
    def tokens_per_step(self) -> int:
        return self.pipeline.microbatches * self.pipeline.microbatch_size * self.data.sequence

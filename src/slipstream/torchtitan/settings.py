"""What a config of torchtitan says of the engine (`--slipstream.cutover 4` on its command line), and what it must not
ask for under 2BW: each by its name, with what to change, all at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.models.common.moe import MoE
from torchtitan.trainer import Trainer

from slipstream.errors import ConfigError, UserError
from slipstream.optim.corrections import Correction, build_correction
from slipstream.schedule.cutover import Cutover, default_cutover

# torchtitan cuts a model by its schedule's name: a stage on each rank, the loss on the last.
SCHEDULE = "1F1B"


@dataclass(kw_only=True, slots=True)
class Settings:
    """The engine's arguments. What is left out is decided by the engine."""

    correction: str = "error_feedback"
    """What is done about the delay: error_feedback, none, or another name of slipstream.optim.CORRECTIONS."""

    cutover: int | None = None
    """Microbatches of a step that read the weights of one update ago; the others read the newest. None: one more than
    there are stages, P + 1, and on processors 2P - 3 if that is more. 0: synchronous. All of them: PipeDream-2BW."""

    synchronous: int = 0
    """Flush the first steps, this many."""

    in_flight: int | None = None
    """Microbatches that the first stage keeps between forward and backward. None: measured."""

    timeout_seconds: float = 300.0
    """A neighbour that is silent for longer is an error that names it."""

    optimizer: str | None = None
    """An optimizer of slipstream by name (muon, ...), sharded over FSDP2. None: torchtitan's own, as configured."""

    lr: float | None = None
    """Learning rate of that optimizer. None: its default."""

    optimizer_options: dict[str, float] = field(default_factory=dict)
    """Further options of that optimizer, for example weight_decay 0.1 momentum 0.95."""

    def __post_init__(self) -> None:
        if self.optimizer is None and (self.lr is not None or self.optimizer_options):
            raise UserError(
                "slipstream.lr and slipstream.optimizer_options belong to slipstream.optimizer, which is not set. Name "
                "one (muon), or set torchtitan's optimizer.param_groups."
            )

    def old_part(self, stages: int, microbatches: int, on_host: bool) -> int:
        """The cutover of every step, as a number."""
        if self.cutover is not None:
            return self.cutover
        whole = self.made().corrects_gradient  # such a correction takes a gradient that is old throughout
        return microbatches if whole else default_cutover(stages, microbatches, on_host)

    def replicas(self, stages: int, microbatches: int, on_host: bool) -> int:
        """How many copies of a stage the engine asks for beside the master; it refuses any other number."""
        cutover = Cutover(microbatches, self.old_part(stages, microbatches, on_host), lambda group: False)
        return 3 if cutover.mixed and self.made().looks_ahead else 2

    def made(self) -> Correction:
        return build_correction(self.correction)


def check(config: Trainer.Config) -> None:
    """Before a process group is made."""
    if problems := list(refused(config)):
        raise ConfigError(problems)


def refused(config: Any) -> Iterator[str]:
    yield from _parallelism(config.parallelism)
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        yield (
            "loss: ChunkedLossWrapper runs the head of the master, and 2BW's microbatches read a bank. Set loss to its "
            "inner loss_fn, as with_2bw does."
        )
    if config.training.enable_cpu_offload:
        yield "training.enable_cpu_offload: banks and master stay on the device. Set it to False."
    if not config.training.disable_cuda_graphs:
        yield "training.disable_cuda_graphs: a pipeline has no CUDA graphs. Set it to True."
    if type(config.checkpoint)._owner is not CheckpointManager:
        yield (
            f"checkpoint: {type(config.checkpoint).__qualname__} is not torchtitan's CheckpointManager (DCP), with "
            "which banks are saved. Use CheckpointManager.Config."
        )
    kinds = {group.optimizer_name for group in config.optimizer.param_groups}
    if config.slipstream.optimizer is None and (others := kinds - {"Adam", "AdamW"}):
        yield (
            f"optimizer.param_groups names {sorted(others)[0]}, whose own collectives would meet those of the "
            "microbatches in flight. Set slipstream.optimizer to muon, or use AdamW."
        )
    if config.slipstream.optimizer is None and len(kinds) > 1:
        yield f"optimizer.param_groups mixes {' and '.join(sorted(kinds))}: an update is one optimizer's. Use one."
    if config.model_spec is not None:
        yield from _model(config.model_spec)


def _parallelism(parallelism: Any) -> Iterator[str]:
    if parallelism.pipeline_parallel_degree < 2:
        yield "parallelism.pipeline_parallel_degree is 1: 2BW is a pipeline's schedule. Set it to 2 or more."
    if parallelism.pipeline_parallel_schedule != SCHEDULE or parallelism.pipeline_parallel_schedule_csv:
        yield (
            f"parallelism.pipeline_parallel_schedule is {parallelism.pipeline_parallel_schedule}, and 2BW takes its "
            f"place. Leave it at {SCHEDULE}, without a csv."
        )
    if parallelism.context_parallel_degree > 1:
        yield "parallelism.context_parallel_degree: the engine knows no context ranks. Set it to 1; use FSDP or TP."
    if parallelism.expert_parallel_degree > 1:
        yield "parallelism.expert_parallel_degree: the engine knows no expert ranks. Set it to 1; use FSDP or TP."
    if parallelism.spmd_backend == "full_dtensor":
        yield (
            "parallelism.spmd_backend full_dtensor: stages would send DTensors. Set it to spmd_types, torchtitan's "
            "default."
        )


def _model(spec: Any) -> Iterator[str]:
    if spec.pipelining_fn is None:
        yield f"model_spec: torchtitan cannot cut {spec.name} into stages. Use a model with a pipelining_fn."
    if has_quantization(spec.model):
        yield (
            f"model_spec: {spec.name} {spec.flavor} has quantized layers (float8, MX, NVFP4), whose scales belong to "
            "one set of weights. Leave the converters out."
        )
    balanced = [
        name for name, moe, *_ in spec.model.traverse(MoE.Config) if moe.load_balance_coeff is not None
    ]
    if balanced:
        yield (
            f"model_spec: '{balanced[0]}' balances its experts with load_balance_coeff, from counts that the master "
            "would have to see, and only banks see tokens. Set load_balance_coeff to None in every MoE layer."
        )
    if getattr(spec.model, "enable_weight_tying", False):
        yield f"model_spec: {spec.name} {spec.flavor} ties embedding and head, which torchtitan's pipelines cannot."

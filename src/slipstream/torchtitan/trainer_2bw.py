"""torchtitan's trainer on Schedule2BW.

Everything is torchtitan's, built in its order, but for this: the pieces of the model have copies (`Copies`), the
engine is made last, when weights and optimizer are there, and a training step hands one group to it. A step's
microbatches are those of all its accumulation steps: m = accumulation steps x microbatches of a local batch. The
gradient is a sum over tokens divided by their global number, as torchtitan's is; the engine reduces, clips, steps and
publishes.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.override import derive
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from slipstream.optim.sharded import local as part_of
from slipstream.pipeline.runtime import Schedule2BW
from slipstream.torchtitan.checkpoint import Banks, CheckpointManager2BW
from slipstream.torchtitan.optimizers import Optimizers2BW, only
from slipstream.torchtitan.settings import Settings, check

Batch = tuple[dict[str, Tensor], Tensor]
Counts = tuple[int, list[float]]


class Trainer2BW(Trainer):
    """See the module docstring."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        slipstream: Settings = field(default_factory=Settings)

    def __init__(self, config: Config) -> None:
        self._landed = False
        self._engine: Schedule2BW | None = None
        self._line: Line | None = None  # to be written
        if config.checkpoint.create_seed_checkpoint:  # of one rank, without a pipeline
            super().__init__(config)
            return
        check(config)
        settings = config.slipstream
        spec = config.model_spec
        assert spec is not None
        config.model_spec = replace(spec, pipelining_fn=partial(self._cut, spec.pipelining_fn))
        config.checkpoint = derive(config.checkpoint, CheckpointManager2BW.Config)
        if settings.optimizer is not None:
            options = {**settings.optimizer_options, "lr": settings.lr}
            config.optimizer = derive(
                config.optimizer, Optimizers2BW.Config, name=settings.optimizer, options=options
            )
        super().__init__(config)
        self._engine = self.pp_schedule = self._built(settings)
        if config.validator.enable:
            self._validate_by_groups()
        banks = Banks(self._engine, self.optimizers, lambda: self.step, self.train_context)
        assert isinstance(self.checkpointer, CheckpointManager2BW)
        self.checkpointer.attach(banks)

    @property
    def microbatches(self) -> int:
        """m: of a step, on this rank."""
        return self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches

    @property
    def _on_host(self) -> bool:
        return self.device.type == "cpu"

    def _cut(self, cut: Any, model: nn.Module, *, parallelize_fn: Any, **how: Any) -> Any:
        """torchtitan's own cut, with copies. Its schedule is dropped for the engine, which has to wait for weights."""
        count = self.config.slipstream.replicas(self.parallel_dims.pp, self.microbatches, self._on_host)
        self._copies = Copies(parallelize_fn, count)
        return cut(model, parallelize_fn=self._copies, **how)

    def _built(self, settings: Settings) -> Schedule2BW:
        master, dims = self.model_parts[0], self.parallel_dims
        cutover = settings.old_part(dims.pp, self.microbatches, self._on_host)
        logger.info(f"slipstream: {self.microbatches} microbatches, of which {cutover} read the bank")
        return Schedule2BW(
            stage_of(master, dims, self.device),
            self.microbatches,
            self._loss,
            lambda module: only(self.optimizers),
            settings.correction,
            self.config.training.max_norm,
            synchronous=settings.synchronous,
            cutover=cutover,
            in_flight=settings.in_flight,
            mesh=mesh_of(dims),
            replicas=self._copies.materialise(self.device),
            scale_grads=False,
            data_reduction="sum",
            timeout=settings.timeout_seconds,
        )

    def _loss(self, output: Any, target: Tensor, **kwargs: Any) -> Tensor:
        return self.loss_fn(output, target, **kwargs)[0]

    def _validate_by_groups(self) -> None:
        """The engine evaluates a whole group at a time: as many tokens as before, in fewer and larger steps."""
        validator, folded = self.validator, self.gradient_accumulation_steps
        validator.pp_schedule = self._engine
        validator.local_batch_size *= folded
        if validator.config.steps != -1:
            validator.config = replace(validator.config, steps=math.ceil(validator.config.steps / folded))

    # A step -----------------------------------------------------------------------------------------------

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        rates = self.lr_schedulers.get_metrics()
        self.checkpointer.maybe_wait_for_staging()  # an update may write the master at any time from here on
        batches = [next(data_iterator) for _ in range(self.microbatches)]
        local = self._moved(torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batches]).sum())
        tokens = local
        if self.parallel_dims.dp_enabled:
            tokens = dist_utils.dist_sum_tensor(local.clone(), self.parallel_dims.get_mesh("batch"))
        loss = self.forward_backward_step(
            input_dict=[self._on_device(inputs) for inputs, _ in batches],
            labels=[self._moved(labels) for _, labels in batches],
            global_valid_tokens=tokens,
        ).detach()
        self.lr_schedulers.step()
        self._log()
        if self.metrics_processor.should_log(self.step):
            self._line = self._told(loss, local, tokens, rates)
        if self.config.validator.enable and self.validator.should_validate(self.step):
            self._log()

    def _on_device(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {k: self._moved(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}

    def _moved(self, tensor: Tensor) -> Tensor:
        """To the device. From memory that is not pinned that would wait until all that is queued there is done, and a
        pipeline whose hosts wait has its bubble back."""
        pinned = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return pinned.to(self.device, non_blocking=True)

    def _told(self, loss: Tensor, local: Tensor, tokens: Tensor, rates: dict[str, float]) -> "Line":
        """What this step's line will say, on its way to the host."""
        loss = part_of(loss).double().squeeze()
        found = torch.stack([loss, torch.full_like(loss, self.ntokens_seen)])  # sums over data ranks
        most = loss * tokens / local
        mesh = self.parallel_dims.get_optional_mesh("loss") if self.parallel_dims.dp_enabled else None
        if mesh is not None:
            dist.all_reduce(found, group=mesh.get_group())
            dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group())
        values = torch.cat([found, most[None]]).to("cpu", non_blocking=True)
        return Line(
            self.step, values, queued_so_far(self.device), rates, taken_counts(self.metrics_processor)
        )

    def _log(self) -> None:
        """torchtitan's line of the last step that has one. It is written when the step after that is queued: by then it
        has been computed, as a rule. The norm is that of the newest update that is done, perhaps an older one's."""
        line, self._line = self._line, None
        if line is None:
            return
        assert self._engine is not None
        if line.done is not None:
            line.done.synchronize()
        mean, seen, most = line.values.tolist()
        if not math.isfinite(mean):
            raise RuntimeError(f"Loss is not finite ({mean}) at step {line.step}. Stopping training.")
        norms = self._engine.grad_norms
        newest = max(norms, default=None)
        extra = {"n_tokens_seen": seen, "slipstream/skipped_steps": self._engine.skipped, **line.rates}
        if newest is not None:
            extra["slipstream/step_of_grad_norm"] = newest + 1
        norm = math.nan if newest is None else norms[newest]
        later = taken_counts(self.metrics_processor)
        give_counts(self.metrics_processor, line.counts)
        self.metrics_processor.log(line.step, mean, most, norm, extra_metrics=extra)
        give_counts(self.metrics_processor, later)

    # The end ----------------------------------------------------------------------------------------------

    def train(self) -> None:
        super().train()
        self.land()

    def land(self) -> None:
        """Let every step that was handed in update the master. On all ranks together."""
        if self._engine is not None:
            with self.train_context():
                self._engine.drain()
            self._log()
        self._landed = True

    def close(self) -> None:
        super().close()
        if self._engine is not None:
            failed = None if self._landed else RuntimeError("training did not end")
            self._engine.__exit__(type(failed), failed, None)


@dataclass(frozen=True)
class Line:
    """What a step logs. `values`: loss, tokens seen, largest loss; there when `done` is."""

    step: int
    values: Tensor
    done: torch.cuda.Event | None
    rates: dict[str, float]
    counts: Counts


def taken_counts(processor: MetricsProcessor) -> Counts:
    """What torchtitan has counted since its last line: tokens, and seconds of loading. It counts anew from here."""
    counts = processor.ntokens_since_last_log, processor.data_loading_times
    processor.ntokens_since_last_log, processor.data_loading_times = 0, []
    return counts


def give_counts(processor: MetricsProcessor, counts: Counts) -> None:
    processor.ntokens_since_last_log, processor.data_loading_times = counts


def queued_so_far(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class Copies:
    """`parallelize_fn`, applied to copies of a piece too. `made` holds them, laid out and without values.

    torchtitan's `pipelining_fn` cuts a model that has no values yet and hands each piece to `parallelize_fn`. Every
    copy is laid out there as the piece itself is (tensor parallel, activation checkpointing, compile, FSDP2). So no
    rank ever holds a whole stage that is to be sharded, and random numbers initialise the master alone.
    """

    def __init__(self, parallelize: Callable[..., nn.Module], count: int) -> None:
        self._parallelize, self._count = parallelize, count
        self.made: list[nn.Module] = []

    def __call__(self, piece: nn.Module, **how: Any) -> nn.Module:
        self.made += [self._parallelize(copy.deepcopy(piece), **how) for _ in range(self._count)]
        return self._parallelize(piece, **how)

    def materialise(self, device: torch.device) -> list[nn.Module]:
        """With memory; the engine gives them their values, the master's."""
        for module in self.made:
            module.to_empty(device=device)
            module.train()
        return self.made


def stage_of(master: nn.Module, dims: ParallelDims, device: torch.device) -> PipelineStage:
    pipeline = dims.get_mesh("pp")
    return PipelineStage(master, pipeline.get_local_rank(), dims.pp, device, group=pipeline.get_group("pp"))


def mesh_of(dims: ParallelDims) -> DeviceMesh | None:
    """The ranks that hold this rank's stage; None where it is alone."""
    shard = "fsdp" if dims.spmd_backend == "partial_dtensor" else "dp_shard"
    return dims.get_activated_mesh(["dp_replicate", shard, "tp"])

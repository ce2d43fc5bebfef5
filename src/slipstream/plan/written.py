"""A plan for programs: the settings that run a layout as TOML, and everything as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slipstream.formats import toml_value
from slipstream.models.sizes import PRESETS, ModelConfig
from slipstream.plan.explain import explain, losses
from slipstream.plan.layout import RUNNABLE, Layout, Plan, why_not
from slipstream.plan.start import split


def to_toml(plan: Plan, layout: Layout, model_name: str) -> str | None:
    """The settings that run `layout`; None where `slipstream train` cannot."""
    shape, job = layout.shape, plan.job
    if why_not(job, shape):
        return None
    half = "bfloat16" if shape.asynchronous else "bfloat16_autocast"  # without banks weights stay in float32
    start, cutover = {}, shape.cutover
    if layout.start:
        start = {layout.start.key: layout.start.share}
        if layout.start.shape.asynchronous:
            cutover = layout.start.shape.cutover  # one for the whole run, and more than m of them are all
    device = job.cluster.device
    chosen: dict[str, dict[str, Any]] = {
        "model": job.model.values
        or ({"preset": model_name} if model_name in PRESETS else _shape(job.config)),
        "data": {"sequence": job.sequence},
        "pipeline": {
            "schedule": RUNNABLE[shape.schedule],
            "stages": shape.stages,
            "data_ranks": shape.data_ranks,
            "microbatches": shape.microbatches,
            "microbatch_size": shape.microbatch_size * shape.data_ranks,
            "cutover": cutover,
            "fine_start": start.get("pipeline.fine_start"),
            "boundaries": [layers.start for layers in layout.cut[1:]] or None,
            "in_flight": shape.in_flight,
            "shard_optimizer": shape.shard_optimizer or None,
        },
        "optim": {
            "name": job.optimizer,
            "correction": split(job.correction)[0] if shape.asynchronous else None,
            "sync_start": start.get("optim.sync_start"),
            "options.state_dtype": "bfloat16" if job.precision.momentum == 2 else None,
        },
        "train": {
            "device": "cpu" if device.processor else None,
            "dtype": half if job.precision.bank == 2 else "float32",
            "gradient_dtype": "bfloat16" if job.precision.gradient == 2 else None,
            "activation_checkpointing": shape.checkpointing or None,
        },
    }
    differs = "\n".join(f"# {line}" for line in job.model.differs.splitlines())
    sections = [differs] if differs else []
    for section, values in chosen.items():
        lines = [f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None]
        sections.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(sections) + "\n"


def _shape(config: ModelConfig) -> dict[str, Any]:
    """A model without a preset, key by key."""
    left_out = ("init_std", "document_mask", "end_of_document")
    return {key: value for key, value in asdict(config).items() if key not in left_out}


def to_json(plan: Plan, model_name: str) -> dict[str, Any]:
    """Everything, for programs."""
    job = plan.job
    return {
        "model": model_name,
        "devices": job.cluster.devices,
        "device": job.cluster.device.name,
        "batch_tokens": job.batch_tokens,
        "sequence": job.sequence,
        "optimizer": job.optimizer,
        "correction": job.correction,
        "considered": plan.considered,
        "fitting": plan.fitting,
        "penalty": _price_json(plan),
        "explanation": explain(plan),
        "layouts": [_layout_json(plan, layout, model_name) for layout in plan.layouts],
    }


def _layout_json(plan: Plan, layout: Layout, model_name: str) -> dict[str, Any]:
    return {
        **asdict(layout.shape),
        "boundaries": [layers.start for layers in layout.cut[1:]],
        "delay": layout.delay,
        "net_gain": plan.net_gain(layout),
        "tokens_per_second": layout.tokens_per_second,
        "seconds_per_update": layout.speed.seconds,
        "mean_seconds_per_update": layout.mean_seconds,
        "start": _start_json(layout),
        "seconds_to_loss": plan.job.training_tokens / layout.score,
        "mfu": layout.mfu,
        "idle": layout.speed.idle,
        "losses": losses(layout),
        "memory_bytes": layout.memory_bytes,
        "memory": [{**asdict(rank), "total": rank.total} for rank in layout.memory],
        "toml": to_toml(plan, layout, model_name),
    }


def _price_json(plan: Plan) -> dict[str, Any] | None:
    """The entry that decides, and where a start was measured elsewhere that one, with the share that it leaves."""
    price, layout = plan.price, plan.best_asynchronous
    if price is None:
        return None
    start = bool(layout.start if layout else price.started)
    used, *more = price.entries(start)
    return asdict(used) | {"start": asdict(more[0]) | {"leaves": price.left()} if more else None}


def _start_json(layout: Layout) -> dict[str, Any] | None:
    start = layout.start
    if start is None:
        return None
    return {
        "key": start.key,
        "share": start.share,
        "microbatches": start.shape.microbatches,
        "seconds_per_update": start.seconds,
    }

"""What follows from a resolved run, in numbers a person wants to see before it starts."""

from __future__ import annotations

from slipstream.config.resolve import model_config, updates
from slipstream.config.settings import Config
from slipstream.models.sizes import active_parameters, flops_per_token, parameters
from slipstream.optimizers import OPTIMIZERS, check_options
from slipstream.schedule.cutover import default_cutover


def facts(config: Config) -> dict[str, str]:
    """Derived quantities of a resolved run, by name."""
    train, pipeline = config.train, config.pipeline
    assert pipeline.stages is not None
    total_tokens = train.steps * config.tokens_per_step
    return {
        **_model(config, total_tokens),
        "tokens per update": f"{config.tokens_per_step:,} ({pipeline.microbatches} microbatches x "
        f"{pipeline.microbatch_size} sequences x {config.data.sequence} tokens)",
        "processes": f"{pipeline.stages * pipeline.data_ranks} "
        f"({pipeline.stages} stages x {pipeline.data_ranks} data ranks)",
        "optimizer": _optimizer(config),
        "old part": _old_part(config),
        "warm-up": f"{updates(config.optim.warmup, train.steps)} updates",
        "flushed updates": f"{updates(config.optim.sync_start, train.steps)} at the start, "
        f"{updates(config.optim.sync_finish, train.steps)} at the end",
    }


def _old_part(config: Config) -> str:
    pipeline = config.pipeline
    m, given = pipeline.microbatches, pipeline.cutover
    if config.synchronous or pipeline.delay in (0, [0]):
        return "nothing: every gradient is of the newest weights"
    if given is None and pipeline.schedule == "2bw":
        assert pipeline.stages is not None
        return f"{default_cutover(pipeline.stages, m)} of {m} microbatches (a run that goes on keeps its own)"
    return f"{m if given is None else given} of {m} microbatches"


def _model(config: Config, tokens: int) -> dict[str, str]:
    if config.model.module is not None:
        return {"model": f"{config.model.module}, your own", "tokens in all": f"{tokens:,}"}
    if config.model.hf is not None:
        return {"model": f"{config.model.hf}, by transformers", "tokens in all": f"{tokens:,}"}
    model = model_config(config.model)
    flops = flops_per_token(model, config.data.sequence)
    return {
        "parameters": f"{parameters(model):,} ({active_parameters(model):,} active per token)",
        "tokens in all": f"{tokens:,} ({tokens / parameters(model):.3g} per parameter)",
        "training FLOPs": f"{flops * tokens:.3g} ({flops:.3g} per token)",
    }


def _optimizer(config: Config) -> str:
    """With every option it will have: those of the run, and its own defaults for the others."""
    optim = config.optim
    own = {key: getattr(optim, key) for key in ("lr", "weight_decay", "adamw_lr", "betas", "momentum")}
    given = {key: value for key, value in (own | optim.options).items() if value is not None}
    check_options(optim.name, given)
    options = {**OPTIMIZERS[optim.name].options, **given}
    if options.get("adamw_lr", ...) is None:
        options["adamw_lr"] = options["lr"]
    return ", ".join(
        [optim.name, *(f"{key} {_plain(value)}" for key, value in options.items() if value is not None)]
    )


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return "/".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)

"""What a run is, before it begins: a few lines (`banner`), and every figure that follows from it (`facts`)."""

from __future__ import annotations

from slipstream import __version__
from slipstream.config import Config
from slipstream.config.resolve import model_config
from slipstream.config.settings import updates
from slipstream.formats import si
from slipstream.models.sizes import active_parameters, flops_per_token, parameters
from slipstream.optimizers import OPTIMIZERS, check_options
from slipstream.train import fine
from slipstream.train.preflight import cpu_only

FIRST_OLD = "the first c of m one update old"


def banner(config: Config) -> str:
    """`config` has the cutover and the starts of the run (`cutovers.expected`)."""
    pipeline, train, optim = config.pipeline, config.train, config.optim
    total = train.steps * config.tokens_per_step
    device = "cpu" if cpu_only() else "a GPU if there is one, else cpu"
    own_data = f"{config.data.module} (your own)" if config.data.module else None
    data = own_data or config.data.path or "Python's standard library (set data.path for your own)"
    rows = {
        "model": _model(config),
        "data": f"{data}, sequences of {config.data.sequence} tokens",
        "update": f"{config.tokens_per_step:,} tokens ({pipeline.microbatches} microbatches x "
        f"{pipeline.microbatch_size} x {config.data.sequence}); {train.steps:,} updates, {si(total)} tokens in all",
        "schedule": _schedule(config),
        "optimizer": f"{optim.name}, {optim.schedule} learning rate"
        + ("" if optim.correction in (None, "none") else f", {optim.correction}"),
        "device": f"{device if train.device == 'auto' else train.device}, {train.dtype}"
        + ("" if train.fp8 is None else f", products in fp8 ({train.fp8})"),
        "folder": config.run.dir,
    }
    return "\n".join([f"slipstream {__version__}", *(f"  {name:<10} {text}" for name, text in rows.items())])


def _model(config: Config) -> str:
    if config.own_model:
        name, whose = _own(config)
        return f"{name} ({whose}), vocabulary {config.model.vocab}"
    model = model_config(config.model)
    active = "" if not model.experts else f", {si(active_parameters(model))} active"
    name = config.model.init_from or config.model.preset
    return (
        f"{name}: {si(parameters(model))} parameters{active}, {model.layers} layers, vocabulary {model.vocab}"
    )


def _own(config: Config) -> tuple[str | None, str]:
    """What a model that is not ours is called, and whose it is."""
    module = config.model.module
    return (module, "your own") if module is not None else (config.model.hf, "by transformers")


def _schedule(config: Config) -> str:
    start = fine.length(config)
    text = _stretch(fine.stretch(config, config.train.steps - 1))
    if not 0 < start < config.train.steps:
        return text
    first = fine.stretch(config, 0).pipeline
    return f"{text}; the first {start:,} updates m={first.microbatches}, c={first.cutover}"


def _stretch(config: Config) -> str:
    pipeline = config.pipeline
    if pipeline.schedule == "emulate":
        old = "" if pipeline.cutover is None else f", c={pipeline.cutover}, {FIRST_OLD}"
        return f"emulate: one process, m={pipeline.microbatches}, delay {pipeline.delay}{old}"
    words = [f"P={pipeline.stages} stage{'s' * (pipeline.stages != 1)}", f"m={pipeline.microbatches}"]
    if config.synchronous:
        words.append("flushed at every update")
    else:
        words.append(f"c={pipeline.cutover}, no flush, {FIRST_OLD}")
    if pipeline.data_ranks > 1:
        words.append(f"{pipeline.data_ranks} data ranks")
    return f"{pipeline.schedule}: {', '.join(words)}"


def facts(config: Config) -> dict[str, str]:
    """Derived quantities of a resolved run, by name."""
    train, pipeline, optim = config.train, config.pipeline, config.optim
    tokens = train.steps * config.tokens_per_step
    if config.own_model:
        about = {"model": ", ".join(map(str, _own(config))), "tokens in all": f"{tokens:,}"}
    else:
        model = model_config(config.model)
        flops = flops_per_token(model, config.data.sequence)
        about = {
            "parameters": f"{parameters(model):,} ({active_parameters(model):,} active per token)",
            "tokens in all": f"{tokens:,} ({tokens / parameters(model):.3g} per parameter)",
            "training FLOPs": f"{flops * tokens:.3g} ({flops:.3g} per token)",
        }
    start = fine.length(config)
    old = f"{_old(fine.stretch(config, train.steps - 1))} microbatches"
    if 0 < start < train.steps:
        old += f", {_old(fine.stretch(config, 0))} in the first {start:,} updates"
    if not config.late:
        old = "nothing: every gradient is of the newest weights"
    return about | {
        "tokens per update": f"{config.tokens_per_step:,} ({pipeline.microbatches} microbatches x "
        f"{pipeline.microbatch_size} sequences x {config.data.sequence} tokens)",
        "processes": f"{config.ranks} ({config.stages} stages x {pipeline.data_ranks} data ranks)",
        "optimizer": _optimizer(config),
        "old part": old,
        "warm-up": f"{updates(optim.warmup, train.steps)} updates",
        "flushed updates": f"{updates(optim.sync_start, train.steps)} at the start, "
        f"{updates(optim.sync_finish, train.steps)} at the end",
    }


def _old(config: Config) -> str:
    m, cutover = config.pipeline.microbatches, config.pipeline.cutover
    return f"{m if cutover is None else cutover} of {m}"


def _optimizer(config: Config) -> str:
    """With every option it will have: those of the run, and its own defaults for the others."""
    optim = config.optim
    given = {key: value for key, value in optim.given.items() if value is not None}
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

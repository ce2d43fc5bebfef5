"""What a run is, in a few lines, before it begins."""

from __future__ import annotations

from slipstream import __version__
from slipstream.config import Config
from slipstream.config.resolve import model_config
from slipstream.metrics.report_columns import si
from slipstream.models.sizes import active_parameters, parameters
from slipstream.schedule.cutover import default_cutover
from slipstream.train.preflight import cpu_only


def banner(config: Config) -> str:
    """Of a resolved run."""
    pipeline, train = config.pipeline, config.train
    total = train.steps * config.tokens_per_step
    rows = {
        "model": _model(config),
        "data": f"{_data(config)}, sequences of {config.data.sequence} tokens",
        "update": f"{config.tokens_per_step:,} tokens ({pipeline.microbatches} microbatches x "
        f"{pipeline.microbatch_size} x {config.data.sequence}); {train.steps:,} updates, {si(total)} tokens in all",
        "schedule": _schedule(config),
        "optimizer": f"{config.optim.name}, {config.optim.schedule} learning rate"
        + ("" if config.optim.correction in (None, "none") else f", {config.optim.correction}"),
        "device": f"{_device(config)}, {train.dtype}",
        "folder": config.run.dir,
    }
    lines = [f"  {name:<10} {text}" for name, text in rows.items()]
    return "\n".join([f"slipstream {__version__}", *lines])


def _model(config: Config) -> str:
    if config.model.module is not None:
        return f"{config.model.module} (your own), vocabulary {config.model.vocab}"
    if config.model.hf is not None:
        return f"{config.model.hf} (by transformers), vocabulary {config.model.vocab}"
    model = model_config(config.model)
    active = "" if not model.experts else f", {si(active_parameters(model))} active"
    name = config.model.init_from or config.model.preset
    return (
        f"{name}: {si(parameters(model))} parameters{active}, {model.layers} layers, vocabulary {model.vocab}"
    )


def _data(config: Config) -> str:
    if config.data.module is not None:
        return f"{config.data.module} (your own)"
    return config.data.path or "Python's standard library (set data.path for your own)"


def _schedule(config: Config) -> str:
    pipeline = config.pipeline
    if pipeline.schedule == "emulate":
        return f"emulate: one process, m={pipeline.microbatches}, delay {pipeline.delay}"
    words = [f"P={pipeline.stages} stages", f"m={pipeline.microbatches}"]
    if config.synchronous:
        words.append("flushed at every update")
    else:  # the cutover: how many microbatches of a group read weights one update old; a run that goes on keeps its own
        assert pipeline.stages is not None
        given = pipeline.cutover
        old = default_cutover(pipeline.stages, pipeline.microbatches) if given is None else given
        words.append(f"c={old}, no flush, the first c of m one update old")
    if pipeline.data_ranks > 1:
        words.append(f"{pipeline.data_ranks} data ranks")
    return f"{pipeline.schedule}: {', '.join(words)}"


def _device(config: Config) -> str:
    if config.train.device == "auto":
        return "cpu" if cpu_only() else "a GPU if there is one, else cpu"
    return config.train.device

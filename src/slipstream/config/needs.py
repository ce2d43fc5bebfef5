"""Settings that mean nothing without others: what is derived from that, and what is refused."""

from __future__ import annotations

from slipstream.config.settings import Config


def without_checkpoints(config: Config, problems: list[str]) -> Config:
    """With checkpoint.keep = 0 nothing is saved, so nothing that needs a saved state may be asked for."""
    if config.checkpoint.keep:
        return config
    given = {
        "checkpoint.every": (config.checkpoint, "every"),
        "checkpoint.best": (config.checkpoint, "best"),
        "train.sample_tokens": (config.train, "sample_tokens"),
    }
    for key, (section, name) in given.items():
        if name in section.model_fields_set and (value := getattr(section, name)):
            problems.append(
                f"{key} = {value} cannot take effect: checkpoint.keep = 0 writes no checkpoint. Set {key}=0, or "
                "checkpoint.keep=1."
            )
    return config.model_copy(
        update={
            "checkpoint": config.checkpoint.model_copy(update={"every": 0}),
            "train": config.train.model_copy(update={"sample_tokens": 0}),
        }
    )


def restarts(config: Config, problems: list[str]) -> Config:
    """Which a run in one process has nobody for."""
    pipeline, given = config.pipeline, config.train.restarts
    if pipeline.schedule == "emulate" and (pipeline.elastic or given):
        problems.append(
            "pipeline.elastic and train.restarts cannot take effect with pipeline.schedule=emulate, which runs in one "
            "process. Drop them."
        )
    if pipeline.elastic and pipeline.boundaries is not None:
        problems.append(
            f"pipeline.elastic changes the number of stages, and pipeline.boundaries = {pipeline.boundaries} fixes it. "
            "Drop one of them."
        )
    if pipeline.elastic and given == 0:
        problems.append(
            "pipeline.elastic cannot take effect with train.restarts = 0. Set train.restarts=3, say."
        )
    if not pipeline.elastic and "least_stages" in pipeline.model_fields_set and pipeline.least_stages > 1:
        problems.append("pipeline.least_stages cannot take effect without pipeline.elastic=true.")
    if pipeline.elastic and pipeline.stages is not None and pipeline.least_stages > pipeline.stages:
        problems.append(
            f"pipeline.least_stages = {pipeline.least_stages} is more than pipeline.stages = {pipeline.stages}."
        )
    derived = (3 if pipeline.elastic else 0) if given is None else given
    return config.model_copy(update={"train": config.train.model_copy(update={"restarts": derived})})

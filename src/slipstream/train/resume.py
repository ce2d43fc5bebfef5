"""Into an engine: the state of a checkpoint, whole or adapted to what the run is now.

A switch between a delayed and a flushed schedule, and a fork with other settings, adapt it by the rule of the method:
after a flushed update g-1, groups g ... g+d read z_g.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.config import Config, from_tree
from slipstream.errors import CheckpointError
from slipstream.pipeline.state import bank_name, merge_states, upgraded
from slipstream.schedule.staleness import reads
from slipstream.train import checkpoint
from slipstream.train.build import cutover
from slipstream.train.engine import RunEngine
from slipstream.train.sanity import check_state
from slipstream.train.starts import Starts


def load_into(engine: RunEngine, path: Path, config: Config) -> None:
    """Put the checkpoint at `path` into this rank's engine. `config`: with the starts that the run keeps."""
    manifest = checkpoint.manifest(path)
    stored = from_tree(manifest.says("config", dict))
    stored = Starts.had(manifest, stored).kept(stored)
    try:
        fresh = engine.capture()
        own = fresh["master"].keys() | fresh["buffers"].keys()
        state = upgraded(merge_states(checkpoint.read(path, manifest, own.__contains__)))
        state = state | {"hyper": _completed(state["hyper"], fresh["hyper"])}
        state = adapt_banks(adapt_optimizer(state, stored, config, engine), stored, config)
        check_state(path, state, fresh, manifest.step)
        engine.load_state_dict(state)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"'{path}' holds a state that is not of this run: {type(error).__name__} {error}."
        ) from error


def adapt_banks(state: dict[str, Any], stored: Config, config: Config) -> dict[str, Any]:
    """The banks that the groups after the boundary read, by the rule of the run as it is now.

    A bank the old run kept for the same read goes on; any other is the master, as after a flush.
    """
    before, after = delays(stored), delays(config)
    same_cutover = cutover(stored).given == cutover(config).given
    if (
        before == after
        and same_cutover
        and stored.optim == config.optim
        and stored.train.steps == config.train.steps
    ):
        return state
    group, late = state["group"], max(after)
    banks = {}
    for reader in range(group, group + late + 1):
        read = reads(reader, 0, cutover(config), late)
        if read.index > group:
            continue  # published later
        same = before == after and read == reads(reader, 0, cutover(stored), late)
        name = bank_name(reader - group)
        kept = state["banks"].get(name) if same else None
        banks[name] = state["master"] if kept is None else kept
    return state | {"banks": banks, "published": dict.fromkeys(banks, True)}


def adapt_optimizer(
    state: dict[str, Any], stored: Config, config: Config, engine: RunEngine
) -> dict[str, Any]:
    """A fork takes its settings from its own config; another optimizer starts with empty state."""
    state = state | {
        "correction": {} if stored.optim.correction != config.optim.correction else state["correction"]
    }
    if stored.optim == config.optim:
        return state
    fresh = engine.capture()["hyper"]
    if stored.optim.name != config.optim.name:
        return state | {"optimizer": {name: {} for name in fresh}, "hyper": fresh}
    # Counters that an optimizer keeps among its settings ("step") go on; everything else is the new config's.
    hyper = {
        name: values
        | {key: state["hyper"][name][key] for key in values if key == "step" and name in state["hyper"]}
        for name, values in fresh.items()
    }
    return state | {"hyper": hyper}


def _completed(hyper: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """With the settings that the optimizer, or torch's, did not have yet when this was written: at their defaults,
    which are what it did before."""
    return {
        name: fresh[name] | values if name in fresh and isinstance(values, dict) else values
        for name, values in hyper.items()
    }


def delays(config: Config) -> list[int]:
    """The delay of each stage the config asks for."""
    if config.synchronous:
        return [0]
    return config.pipeline.delay if isinstance(config.pipeline.delay, list) else [config.pipeline.delay]

"""The state of a run at the boundary after an update, as plain dictionaries keyed by parameter names.

For the boundary after update g: the master z_{g+1}, the banks that groups g+1 and g+2 will read, optimizer state
and hyperparameters by parameter, the correction, counters. Names are the module's own: where they are global
(the stages are cut from one model), the union over stages (`merge_states`) loads into any number of stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from slipstream.errors import CheckpointError, UserError
from slipstream.lists import copy_
from slipstream.pipeline.update import Updater
from slipstream.pipeline.versions import Part, Versions, local, sharded_as

FORMAT = 1
State = dict[str, Any]
SECTIONS = ("master", "optimizer", "hyper", "buffers", "memory")


def capture(updater: Updater) -> State:
    """The state at the boundary this process has reached; tensors are the live ones (clone to keep)."""
    state: State = {
        "format": FORMAT,
        "group": updater.completed,
        "skipped": updater.skipped,
        "master": {},
        "banks": {},
        "optimizer": {},
        "hyper": {},
        "buffers": {},
        "memory": {},  # the correction's, of single tensors
        "correction": updater.correction.state_dict(),
    }
    hyper = {
        id(p): values
        for entry, values in zip(updater.optimizer.param_groups, updater.hyperparameters(), strict=True)
        for p in entry["params"]
    }
    for versions in updater.versions:
        owned = [(versions.names[i], versions.master.parameters[i], i) for i in versions.owned]
        if twice := next((name for name, *_ in owned if name in state["master"]), None):
            raise CheckpointError(_named_twice(twice, "master"))
        for name, parameter, index in owned:
            state["master"][name] = versions.master.weights[index]
            state["optimizer"][name] = dict(updater.optimizer.state.get(parameter, {}))
            state["hyper"][name] = hyper[id(parameter)]
            if memory := updater.correction.memory_of(versions.master.weights[index]):
                state["memory"][name] = memory
        for group, replica in versions.banks().items():
            if replica.freed:
                raise UserError(
                    f"The bank of group {group} is gone, as its old part is done. Call capture() in after_update, "
                    "where the state at a boundary is whole, or state_dict(), which drains."
                )
            bank = state["banks"].setdefault(str(group), {})
            bank.update({name: replica.weights[index] for name, _, index in owned})
        state["buffers"].update({name: versions.module.get_buffer(name) for name in versions.buffers})
    return state


def restore(updater: Updater, state: State) -> None:
    """Put `state`, which may hold more names than this process has, into the master, banks and optimizer."""
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"The state has format {state.get('format')!r}; this version reads format {FORMAT}."
        )
    for versions in updater.versions:
        _require(versions.names, state["master"], "master")
        owned = versions.owned  # where the optimizer is sharded, the rest of the master has no memory here
        copy_(
            [versions.master.weights[i] for i in owned], [_fit(versions, state["master"], i) for i in owned]
        )
        versions.restore(_banks(versions, state))
        # Not the caches: those of before are as good as ever, and another one's need not fit.
        saved = {name: state["buffers"][name] for name in versions.buffers if name in state["buffers"]}
        for module in (versions.module, *(replica.module for replica in versions.replicas)):
            for name, buffer in saved.items():
                module.get_buffer(name).copy_(buffer)
        for i in owned:
            memory = state.get("memory", {}).get(versions.names[i], {})
            updater.correction.remember(versions.master.weights[i], memory)
    _restore_optimizer(updater, state)
    updater.correction.load_state_dict(state["correction"])
    updater.completed = state["group"]
    updater.skipped = state["skipped"]
    updater.forget()


def _banks(versions: Versions, state: State) -> dict[Part, list[Tensor]]:
    """What each part of a group reads whose weights exist at this boundary, by the rule as it is now.

    Where `synchronous`, the cutover or the delay is not what it was when the state was saved, a bank that was never
    published is the master, as after a flush.
    """
    boundary = state["group"]
    banks: dict[Part, list[Tensor]] = {}
    shared: dict[tuple, list[Tensor]] = {}
    for group in range(boundary, boundary + versions.delay + 1):
        for part, read in versions.parts(group):
            bank = state["banks"].get(str(group))
            if read.index > boundary:
                continue  # published later
            if bank is None or (read.kind == "master" and read.index == boundary):
                bank = state["master"]
            _require(versions.names, bank, f"bank of group {group}")
            tensors = [_fit(versions, bank, i) for i in range(len(versions.names))]
            # Parts that read the same tensors share a replica.
            banks[part] = shared.setdefault(tuple(t.data_ptr() for t in tensors), tensors)
    return banks


def _fit(versions: Versions, tensors: Mapping[str, Tensor], index: int) -> Tensor:
    """The saved tensor of one parameter, as the local tensor this rank holds."""
    name = versions.names[index]
    saved = local(_placed(tensors[name], versions.master.parameters[index]))
    expected = versions.master.weights[index].shape
    if saved.shape != expected:
        raise CheckpointError(
            f"The saved '{name}' has shape {tuple(saved.shape)}, the model's has {tuple(expected)}. "
            "Load a state of the same model."
        )
    return saved


def _placed(saved: Tensor, parameter: Tensor) -> Tensor:
    """A saved tensor of a parameter, whole or this rank's part of it, cut as the parameter is."""
    if not isinstance(parameter, DTensor) or saved.ndim == 0:
        return saved
    if saved.shape == parameter.shape:
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(saved.to(parameter.device), mesh, placements, src_data_rank=None)
    if saved.shape == local(parameter).shape:
        return sharded_as(parameter, saved.to(parameter.device))
    return saved


def _require(names: Sequence[str], tensors: Mapping[str, Any], what: str) -> None:
    missing = [name for name in names if name not in tensors]
    if missing:
        raise CheckpointError(
            f"The state's {what} lacks {len(missing)} of {len(names)} parameters, '{missing[0]}' among them. "
            "Load the union of all stages' states (merge_states), from stages whose parameter names are global."
        )


def _restore_optimizer(updater: Updater, state: State) -> None:
    parameters = {id(p): p for p in updater.parameters}
    names = {id(v.master.parameters[i]): v.names[i] for v in updater.versions for i in v.owned}
    _require(list(names.values()), state["optimizer"], "optimizer")
    optimizer = updater.optimizer
    numbers: dict[int, int] = {}
    for entry in optimizer.param_groups:
        for parameter in entry["params"]:
            numbers.setdefault(id(parameter), len(numbers))
    groups = []
    for entry in optimizer.param_groups:
        members = [names[id(p)] for p in entry["params"] if id(p) in names]
        values = (
            dict(state["hyper"][members[0]]) if members else {k: v for k, v in entry.items() if k != "params"}
        )
        groups.append({**values, "params": [numbers[id(p)] for p in entry["params"]]})
    slots = {
        numbers[key]: {what: _own(value, parameters[key]) for what, value in state["optimizer"][name].items()}
        for key, name in names.items()
        if state["optimizer"][name]
    }
    optimizer.load_state_dict({"state": slots, "param_groups": groups})


def _own(value: Any, parameter: Tensor) -> Any:
    return _placed(value, parameter).clone() if isinstance(value, Tensor) else value


def cloned(state: Any) -> Any:
    """A state whose tensors no later step changes."""
    if isinstance(state, Tensor):
        return local(state).clone()
    if isinstance(state, dict):
        # Banks of groups 0 and 1 are one: keep them one.
        copies: dict[int, Tensor] = {}
        return {key: _cloned_once(value, copies) for key, value in state.items()}
    return state


def _cloned_once(value: Any, copies: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.data_ptr() not in copies or value.numel() == 0:
            copies[value.data_ptr()] = local(value).clone()
        found = copies[value.data_ptr()]
        return found if found.shape == value.shape else local(value).clone()
    if isinstance(value, dict):
        return {key: _cloned_once(item, copies) for key, item in value.items()}
    return value


def merge_states(states: Sequence[State]) -> State:
    """The union of the states of all stages, at one boundary; loads into any number of stages."""
    if not states:
        raise UserError("merge_states needs at least one state.")
    boundaries = sorted({state["group"] for state in states})
    if len(boundaries) > 1:
        raise CheckpointError(f"The states belong to different boundaries: updates {boundaries}.")
    merged: State = {**states[0], **{section: {} for section in SECTIONS}, "banks": {}}
    for state in states:
        for section in SECTIONS:
            _union(merged[section], state.get(section, {}), section)
        for group, bank in state["banks"].items():
            _union(merged["banks"].setdefault(group, {}), bank, f"bank of group {group}")
    return merged


def _union(target: dict[str, Any], source: Mapping[str, Any], what: str) -> None:
    for name, value in source.items():
        if name in target and what != "buffers":
            raise CheckpointError(_named_twice(name, what))
        target[name] = value


def _named_twice(name: str, what: str) -> str:
    return (
        f"Two stages both call a parameter '{name}' ({what}), so their states cannot be joined. Give the parameters "
        "global names: cut the stages from one model, or keep the full model's module tree."
    )

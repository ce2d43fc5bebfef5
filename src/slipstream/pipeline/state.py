"""The state of a run at the boundary after an update, as plain dictionaries keyed by parameter names.

For the boundary after update g: the master z_{g+1}, the banks that groups g+1 ("current") and g+2 ("next") will read,
optimizer state and hyperparameters by parameter, the correction, counters. Names are the module's own: where they are
global (the stages are cut from one model), the union over stages (`merge_states`) loads into any number of stages.
Where two stages call different parameters by one name, all begin with the stage's number, and the union loads into as
many.

Tensors are the live ones, and DTensors stay DTensors: `torch.distributed.checkpoint` saves them and loads into them,
in another layout and another number of stages too. `cloned_state` makes a state that later steps do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import CheckpointError, UserError
from slipstream.lists import copy_
from slipstream.optim.sharded import local
from slipstream.pipeline.compact import Halves, whole
from slipstream.pipeline.replica import Part, sharded_as
from slipstream.pipeline.update import Updater
from slipstream.pipeline.versions import THE_MASTER, Versions
from slipstream.torch_late import is_dtensor
from slipstream.torch_private import tree_flatten, tree_map

FORMAT = 2  # 1: banks went by the number of the group that reads them
State = dict[str, Any]
SECTIONS = ("master", "optimizer", "hyper", "buffers", "memory")


def bank_name(offset: int) -> str:
    """Of the bank that the group `offset` after the boundary reads: the same at every boundary."""
    return ("current", "next")[offset] if offset < 2 else f"next_{offset}"


def capture(updater: Updater, *, at_rest: bool = False) -> State:
    """The state at the boundary this process has reached; tensors are the live ones (`cloned_state` to keep).

    `at_rest`: nothing is in flight, and the state may be loaded in place: every bank has memory of its own and is in
    it, published or not, and what the optimizer makes at its first step is there too.
    """
    fresh = at_rest and updater.completed == 0 and not updater.optimizer.state
    slots = _first_slots(updater) if fresh else updater.optimizer.state
    state: State = {
        "format": FORMAT,
        "group": updater.completed,
        "skipped": updater.skipped,
        "fresh": fresh,  # the optimizer has not stepped: its state only shows what there will be
        "published": {},  # bank -> whether it is one
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
        prefix = versions.prefix
        owned = [(prefix + versions.names[i], versions.master.parameters[i], i) for i in versions.owned]
        for name, parameter, index in owned:
            state["master"][name] = _master_of(versions, index, at_rest)
            state["optimizer"][name] = dict(slots.get(parameter, {}))
            state["hyper"][name] = hyper[id(parameter)]
            if memory := updater.correction.memory_of(versions.master.weights[index]):
                state["memory"][name] = memory
        published = set(versions.banks())
        banks = versions.apart(updater.completed) if at_rest else versions.banks()
        for group, replica in banks.items():
            if any(i in replica.freed for i in versions.owned):
                raise UserError(
                    f"The bank of group {group} is gone, as its old part is done. Call capture() in after_update, "
                    "where the state at a boundary is whole, or state_dict(), which drains."
                )
            bank = state["banks"].setdefault(bank_name(group - updater.completed), {})
            bank.update({name: replica.parameters[index].detach() for name, _, index in owned})
            state["published"][bank_name(group - updater.completed)] = group in published
        state["buffers"].update(
            {prefix + name: versions.module.get_buffer(name) for name in versions.buffers}
        )
    return state


def _master_of(versions: Versions, index: int, at_rest: bool) -> Tensor | Halves:
    """Live; of a compact master its halves, and at rest, where others load into it, a whole in memory of its own."""
    if versions.compact is None:
        return versions.master.parameters[index].detach()
    kept = versions.compact.kept(index)
    if not at_rest:
        return kept
    return kept.whole() if isinstance(kept, Halves) else kept.clone()


def _first_slots(updater: Updater) -> Mapping[Tensor, dict[str, Any]]:
    """The state that a first step would make, as zeros: seen by letting a copy of the optimizer take that step."""
    stand_ins = {
        id(p): nn.Parameter(torch.zeros_like(p)) if p.requires_grad else nn.Parameter(torch.zeros(0), False)
        for entry in updater.optimizer.param_groups
        for p in entry["params"]
    }
    probe = copy.deepcopy(updater.optimizer, dict(stand_ins))
    for stand_in in stand_ins.values():
        stand_in.grad = torch.zeros_like(stand_in) if stand_in.requires_grad else None
    probe.step()
    slots: dict[Tensor, dict[str, Any]] = {}
    for entry in updater.optimizer.param_groups:
        for parameter in entry["params"]:
            made = probe.state.get(stand_ins[id(parameter)], {})
            slots[parameter] = {
                k: torch.zeros_like(v) if isinstance(v, Tensor) else v for k, v in made.items()
            }
    return slots


def restore(updater: Updater, state: State) -> None:
    """Put `state`, which may hold more names than this process has, into the master, banks and optimizer.

    Where the optimizer is sharded this is for all data ranks together: each puts in what it owns.
    """
    state = upgraded(state)
    updater.await_copies()
    for versions in updater.versions:
        owned = versions.owned  # where the optimizer is sharded, the rest of the master has no memory here
        names = _names(versions, state["master"])
        _require([names[i] for i in owned], state["master"], "master")
        master = {i: _fit(versions, state["master"], names[i], i) for i in owned}
        if versions.compact is None:
            copy_([versions.master.weights[i] for i in owned], list(master.values()))
        versions.restore(_banks(versions, state, master))
        for replica in versions.in_use():
            for step in updater.peers.gather(replica.weights):
                step.wait()
        # Not the caches: those of before are as good as ever, and another one's need not fit.
        prefix = _prefix(versions, state["buffers"], versions.buffers)
        saved = {
            name: state["buffers"][prefix + name]
            for name in versions.buffers
            if prefix + name in state["buffers"]
        }
        for module in (versions.module, *(replica.module for replica in versions.replicas)):
            for name, buffer in saved.items():
                module.get_buffer(name).copy_(buffer)
        for i in owned:
            memory = state.get("memory", {}).get(names[i], {})
            updater.correction.remember(versions.master.weights[i], memory)
    _restore_optimizer(updater, state)
    updater.correction.load_state_dict(state["correction"])
    updater.completed = state["group"]
    updater.skipped = state["skipped"]
    updater.forget()


def upgraded(state: State) -> State:
    """A state of this format, with all its parts: distributed checkpoints drop empty ones. From format 1, the banks by
    their distance from the boundary."""
    if "format" in state:
        empty: State = {part: {} for part in (*SECTIONS, "banks", "published", "correction")}
        state = empty | state
    if state.get("format") == FORMAT:
        return state
    if "format" not in state:
        raise CheckpointError(
            f"This is not a schedule's state: it has {', '.join(map(repr, list(state)[:3]))}. Load what state_dict() "
            "of a schedule gave; weights alone go into the master, followed by spread_master()."
        )
    if state["format"] != 1:
        raise CheckpointError(
            f"The state has format {state.get('format')!r}; this version reads formats 1 and {FORMAT}."
        )
    banks = {bank_name(int(group) - state["group"]): bank for group, bank in state["banks"].items()}
    return state | {"format": FORMAT, "fresh": False, "banks": banks, "published": dict.fromkeys(banks, True)}


def _banks(versions: Versions, state: State, master: dict[int, Tensor]) -> dict[Part, dict[int, Tensor]]:
    """What each part of a group reads whose weights exist at this boundary, by the rule as it is now, by parameter.

    Where `synchronous`, the cutover or the delay is not what it was when the state was saved, a bank that was never
    published is the master, as after a flush.
    """
    boundary = state["group"]
    # By where they come from, not by their memory: data ranks share alike, also one that owns nothing of a stage.
    sources = {"master": master}
    banks: dict[Part, dict[int, Tensor]] = {}
    if versions.compact is not None:
        banks[THE_MASTER] = master
    for group in range(boundary, boundary + versions.delay + 1):
        name = bank_name(group - boundary)
        for part, read in versions.parts(group):
            if read.index > boundary:
                continue  # published later
            newest = read.kind == "master" and read.index == boundary
            saved = name in state["banks"] and state["published"].get(name, True)
            source = name if saved and not newest else "master"
            if source not in sources:
                bank = state["banks"][name]
                names = _names(versions, bank)
                _require([names[i] for i in versions.owned], bank, f"bank '{name}'")
                sources[source] = {i: _fit(versions, bank, names[i], i) for i in versions.owned}
            banks[part] = sources[source]
    return banks


def _fit(versions: Versions, tensors: Mapping[str, Tensor], name: str, index: int) -> Tensor:
    """The saved tensor of one parameter, as the local tensor this rank holds."""
    saved = local(_placed(whole(tensors[name]), versions.master.parameters[index]))
    expected = versions.master.weights[index].shape
    if saved.shape != expected:
        raise CheckpointError(
            f"The saved '{name}' has shape {tuple(saved.shape)}, the model's has {tuple(expected)}. "
            "Load a state of the same model."
        )
    return saved


def _placed(saved: Any, parameter: Tensor) -> Any:
    """A saved tensor in the layout of `parameter`, where it is one of that parameter's elements."""
    if is_dtensor(saved):
        if is_dtensor(parameter) and saved.device_mesh == parameter.device_mesh:
            return saved.redistribute(placements=parameter.placements)
        saved = saved.full_tensor()
    if not isinstance(saved, Tensor) or not is_dtensor(parameter):
        return saved
    if saved.shape == parameter.shape:
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(saved.to(parameter.device), mesh, placements, src_data_rank=None)
    if saved.shape == local(parameter).shape:
        return sharded_as(parameter, saved.to(parameter.device))
    return saved


def _names(versions: Versions, section: Mapping[str, Any]) -> list[str]:
    prefix = _prefix(versions, section, versions.names)
    return [prefix + name for name in versions.names]


def _prefix(versions: Versions, section: Mapping[str, Any], own: Sequence[str]) -> str:
    """Of the stage's names in a part of a state. That of one stage, saved alone before names had one, has none."""
    return "" if section.keys() <= set(own) else versions.prefix


def _require(names: Sequence[str], tensors: Mapping[str, Any], what: str) -> None:
    missing = [name for name in names if name not in tensors]
    if missing:
        raise CheckpointError(
            f"The state's {what} lacks {len(missing)} of {len(names)} parameters, '{missing[0]}' among them. "
            "Load the union of all stages' states (merge_states), from stages whose parameter names are global."
        )


def _restore_optimizer(updater: Updater, state: State) -> None:
    parameters = {id(p): p for p in updater.parameters}
    names = {
        id(v.master.parameters[i]): name
        for v in updater.versions
        for i, name in enumerate(_names(v, state["optimizer"]))
        if i in v.owned
    }
    _require(list(names.values()), state["optimizer"], "optimizer")
    optimizer = updater.optimizer
    numbers: dict[int, int] = {}
    for entry in optimizer.param_groups:
        for parameter in entry["params"]:
            numbers.setdefault(id(parameter), len(numbers))
    groups = []
    for entry in optimizer.param_groups:
        member = next((names[id(p)] for p in entry["params"] if id(p) in names), None)
        values = {} if member is None else state["hyper"][member]
        kept = entry if member is None else {k: v for k, v in entry.items() if k not in optimizer.defaults}
        groups.append({**kept, **values, "params": [numbers[id(p)] for p in entry["params"]]})
    slots: dict[int, dict[str, Any]] = {}
    if state["fresh"]:
        optimizer.state.clear()
        names = {}
    for key, name in names.items():
        if saved := state["optimizer"][name]:
            slots[numbers[key]] = {
                what: _placed(value, parameters[key]).clone() if isinstance(value, Tensor) else value
                for what, value in saved.items()
            }
    needed = [entry.keys() & optimizer.defaults.keys() for entry in optimizer.param_groups]
    lacking: set[str] = set()
    try:
        optimizer.load_state_dict({"state": slots, "param_groups": groups})
    except KeyError as error:
        lacking = set(map(str, error.args))
    for keys, entry in zip(
        needed, optimizer.param_groups, strict=True
    ):  # torch's add what older ones did not have
        lacking |= keys - entry.keys()
    if lacking:
        raise CheckpointError(
            f"The state is of another optimizer: it has no {', '.join(sorted(lacking))} for "
            f"{type(optimizer).__name__}. Load it into a schedule with the optimizer that it was saved with."
        )


def cloned_state(state: Any) -> Any:
    """A state whose tensors no later step changes; those that are one tensor stay one."""
    copies: dict[tuple, Tensor] = {}

    def cloned(leaf: Any) -> Any:
        if isinstance(leaf, Halves):
            return leaf.whole()
        if not isinstance(leaf, Tensor):
            return leaf
        key = (local(leaf).data_ptr(), tuple(leaf.shape), leaf.dtype) if leaf.numel() else (id(leaf),)
        if key not in copies or not leaf.numel():
            copies[key] = leaf.detach().clone()
        return copies[key]

    return tree_map(cloned, state)


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
        for name, bank in state["banks"].items():
            _union(merged["banks"].setdefault(name, {}), bank, f"bank {name}")
    return merged


def _union(target: dict[str, Any], source: Mapping[str, Any], what: str) -> None:
    """What stages share they call alike: a weight that is tied, a table that each of them has."""
    for name, value in source.items():
        if name in target and not _same(target[name], value):
            raise CheckpointError(
                f"Two stages have something else of the name '{name}' ({what}), so their states cannot be joined. Use "
                "global names: cut the stages from one model, or keep the full model's module tree."
            )
        target[name] = value


def _same(one: Any, other: Any) -> bool:
    leaves, form = tree_flatten(one)
    others, other_form = tree_flatten(other)
    return form == other_form and all(map(_same_leaf, leaves, others))


def _same_leaf(one: Any, other: Any) -> bool:
    one, other = whole(one), whole(other)
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or bool(one == other)
    one, other = local(one), local(other)
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other.to(one.device))

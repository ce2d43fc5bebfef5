"""Muon for hidden matrices and AdamW for the rest, in one optimizer.

For a matrix W [out, in] with gradient G (an expert tensor [E, out, in] is E matrices):

    M ← μ M + (1 - μ) G
    U = (1 - μ^k) G + μ^k M           k = lookahead: 0 momentum alone, 1 Nesterov, 2 the blend applied twice
    W ← (1 - lr wd) W - lr scale Orthogonal(U)

where scale is 0.2 sqrt(max(out, in)) (`match_rms_adamw`, Liu et al. 2025: the step has the RMS of AdamW's, so
one lr serves both), sqrt(max(1, out / in)) (`original`, Jordan et al. 2024) or sqrt(out / in) (`spectral`,
Pethick et al. 2025). With `row_beta`, the rows of Orthogonal(U) are first divided by the root of a running
mean of their squares, and the whole is scaled back to its norm (NorMuon, Li et al. 2025).

Invariants: state is made when the optimizer is, for every trainable parameter, so checkpoint keys agree on
every rank; the result for a matrix depends on that matrix alone (`newton_schulz.py`), so on no stage split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from slipstream.distributed.groups import Wait
from slipstream.errors import UserError
from slipstream.lists import add_, add_recorded, can_combine, copy_, lerp_, lerp_and_add
from slipstream.optim.newton_schulz import STEPS, Stack, orthogonal_stacks
from slipstream.optim.recorded_step import RecordedSteps
from slipstream.optim.sharded import Batch, Exchanges, Grouping, group_matrices, local, orthogonal
from slipstream.optim.velocity import adam_velocity, groups_and_states

SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
}
_ROW_EPS = 1e-10
STATE_DTYPES = {None: None, "float32": None, "bfloat16": torch.bfloat16}


class Muon(Optimizer):
    """Parameter groups carry `algorithm`: "muon" (2-D and 3-D tensors) or "adamw" (anything)."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 2e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        lookahead: int = 1,
        scale: str = "match_rms_adamw",
        row_beta: float | None = None,
        steps: int = STEPS,
        state_dtype: str | None = None,
    ) -> None:
        """`state_dtype`: "bfloat16" for momentum of half the size; None: that of the parameters."""
        if scale not in SCALES:
            raise UserError(f"Muon has no scale {scale!r}. Set scale to {', '.join(SCALES)}.")
        if not 0 <= momentum < 1 or lookahead < 0 or steps < 1 or steps != int(steps):
            raise UserError(
                f"Muon needs 0 <= momentum < 1, lookahead >= 0 and whole steps >= 1, not {momentum=}, "
                f"{lookahead=}, {steps=}."
            )
        if state_dtype not in STATE_DTYPES:
            raise UserError(
                f"Muon has no state_dtype {state_dtype!r}. Leave it out, or set it to 'bfloat16'."
            )
        defaults = {
            "muon": {
                "momentum": momentum,
                "lookahead": lookahead,
                "scale": scale,
                "row_beta": row_beta,
                "steps": int(steps),
                "state_dtype": state_dtype,
            },
            # One pass over memory; the key also makes load_state_dict move `step` to the parameters' device.
            "adamw": {"betas": (0.9, 0.95), "eps": 1e-8, "fused": True},
        }
        both = {"lr": lr, "weight_decay": weight_decay}
        super().__init__([{**both, **defaults[group["algorithm"]], **group} for group in params], {})
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["algorithm"] == "muon" and parameter.ndim not in (2, 3):
                    raise UserError(
                        "Muon takes matrices [out, in] and stacks [experts, out, in], not "
                        f"{tuple(parameter.shape)}. Put it into the group with algorithm 'adamw'."
                    )
                if parameter.requires_grad:
                    self._state_of(group, parameter)
        self._groups = self._exchange_groups()
        self._groupings: dict[int, tuple[list[Parameter], list[torch.dtype], Grouping]] = {}
        self._steps = RecordedSteps()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy makes process groups of its own."""
        super().__setstate__(state)
        self._groups = self._exchange_groups()
        self._groupings = {}
        self._steps = RecordedSteps()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch gives every state the dtype of its parameter; momentum keeps its own."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            dtype = STATE_DTYPES[group["state_dtype"]] if group["algorithm"] == "muon" else None
            for parameter in group["params"] if dtype is not None else ():
                if state := self.state.get(parameter):  # none where another data rank owns it
                    state["momentum_buffer"] = state["momentum_buffer"].to(dtype)

    def close(self, failed: bool = False) -> None:
        """Give back the process groups over which sharded matrices travel. `failed`: another rank may be gone."""
        self._groups.close(failed)

    def _exchange_groups(self) -> Exchanges:
        return Exchanges(
            [p for group in self.param_groups if group["algorithm"] == "muon" for p in group["params"]]
        )

    def _state_of(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state and group["algorithm"] == "muon":
            dtype = STATE_DTYPES[group["state_dtype"]]
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype)
            if group["row_beta"] is not None:
                state["row_second_moment"] = torch.zeros_like(parameter[..., :1])
        elif not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyrefly: ignore[bad-override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for wait in self.step_in_parts():
            wait.wait()
        return loss

    @torch.no_grad()
    def step_in_parts(self) -> Iterator[Wait]:
        """A step that hands out what it waits for (sharded matrices under way) instead of blocking.

        Gradients and hyperparameters are those of the first `next`. The step is done when the iterator ends.
        """
        matrices = []
        for number, group in enumerate(self.param_groups):
            pairs = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
            params, grads = [parameter for parameter, _ in pairs], [grad for _, grad in pairs]
            if params and group["algorithm"] == "adamw":
                self._adamw(group, params, [local(grad) for grad in grads])
            elif params:
                matrices.append(self._muon(dict(group), params, grads, self._grouping(number, params)))
        for waits in matrices:
            yield from waits

    def _grouping(self, number: int, params: list[Parameter]) -> Grouping:
        """Of the parameters of a group that have gradients: as in the last step, as a rule."""
        dtypes = [parameter.dtype for parameter in params]
        known = self._groupings.get(number)
        if known and known[1] == dtypes and all(map(is_, known[0], params)):
            return known[2]
        grouping = group_matrices(params, self._groups)
        self._groupings[number] = (params, dtypes, grouping)
        return grouping

    def _muon(
        self, group: dict[str, Any], params: list[Parameter], grads: list[Tensor], grouping: Grouping
    ) -> Iterator[Wait]:
        blend = group["momentum"] ** group["lookahead"]
        decay = 1 - group["lr"] * group["weight_decay"]

        def fill_with(terms_of: Mapping[int, Tensor], indices: list[int], outs: list[Tensor]) -> None:
            moved = [local(self._state_of(group, params[i])["momentum_buffer"]) for i in indices]
            terms = [terms_of[i] for i in indices]
            # Orthogonal(U) does not depend on U's size, so U / blend will do: one pass, cast included.
            if blend:
                lerp_and_add(moved, terms, 1 - group["momentum"], outs, (1 - blend) / blend)
            else:
                lerp_(moved, terms, 1 - group["momentum"])
                copy_(outs, terms)

        terms_of = dict(enumerate(map(local, grads)))
        recordable = blend and group["row_beta"] is None
        if recordable and self._recorded(group, params, terms_of, grouping.whole, fill_with):
            grouping = replace(grouping, whole=[])
        for item in orthogonal(params, partial(fill_with, terms_of), group["steps"], grouping):
            if not isinstance(item, Batch):
                yield item
                continue
            weights = [local(params[i]) for i in item.indices]
            directions = item.directions
            if group["row_beta"] is not None:
                moments = [self.state[params[i]]["row_second_moment"] for i in item.indices]
                directions = [
                    _by_rows(d, m, group["row_beta"]) for d, m in zip(directions, moments, strict=True)
                ]
            rate = -_rate(group, params[item.indices[0]])
            add_(weights, directions, alpha=rate, factor=decay)

    def _recorded(
        self,
        group: dict[str, Any],
        params: list[Parameter],
        terms_of: Mapping[int, Tensor],
        stacks: Sequence[Stack],
        fill_with: Callable[[Mapping[int, Tensor], list[int], list[Tensor]], None],
    ) -> bool:
        """The step on whole matrices as one launch, where that is worth it and has been met before.

        A step on some of them at a time (a master in halves) is not recorded: each part would keep its memory.
        """
        if len(params) < len(group["params"]):
            return False
        indices = [i for stack in stacks for i in stack.indices]
        weights = [local(params[i]) for i in indices]
        moments = [local(self._state_of(group, params[i])["momentum_buffer"]) for i in indices]
        terms = [terms_of[i] for i in indices]
        if not indices or not can_combine(weights) or not can_combine(moments, terms):
            return False

        def body(numbers: Tensor, grads: Sequence[Tensor], memories: Sequence[Tensor]) -> None:
            fill = partial(fill_with, dict(zip(indices, grads, strict=True)))
            batches = orthogonal_stacks(stacks, fill, group["steps"], memories)
            for (batch, directions), pair in zip(batches, numbers.unbind(), strict=True):
                add_recorded([local(params[i]) for i in batch], directions, pair)

        places = tuple(tensor.data_ptr() for tensor in chain(weights, moments))
        kind = (places, group["momentum"], group["lookahead"], group["steps"])
        decay = 1 - group["lr"] * group["weight_decay"]
        numbers = [(decay, -_rate(group, params[stack.indices[0]])) for stack in stacks]
        return self._steps.run(kind, body, [*weights, *moments], terms, stacks, numbers)

    def _adamw(self, group: dict[str, Any], params: list[Parameter], grads: list[Tensor]) -> None:
        states = [self._state_of(group, parameter) for parameter in params]
        adamw(
            [local(parameter) for parameter in params],
            grads,
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=not group["fused"],
            fused=group["fused"],
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )

    @torch.no_grad()
    def velocity(self, params: Sequence[Parameter]) -> list[Tensor]:
        """-lr scale Orthogonal(M) for a matrix, Adam's velocity for the rest; see `velocity.py`."""
        pairs = list(groups_and_states(self, params))
        ahead = {i: adam_velocity(*pair) for i, pair in enumerate(pairs) if pair[0]["algorithm"] == "adamw"}
        matrices = [i for i in range(len(pairs)) if i not in ahead]
        for steps in sorted({pairs[i][0]["steps"] for i in matrices}):
            own = [i for i in matrices if pairs[i][0]["steps"] == steps]
            ahead |= self._matrices_ahead(own, params, pairs, steps)
        return [ahead[i] if i in ahead else torch.zeros_like(local(p)) for i, p in enumerate(params)]

    def _matrices_ahead(
        self,
        own: list[int],
        params: Sequence[Parameter],
        pairs: Sequence[tuple[dict[str, Any], Mapping[str, Any]]],
        steps: int,
    ) -> dict[int, Tensor]:
        def fill(batch: list[int], outs: list[Tensor]) -> None:
            copy_(outs, [local(pairs[own[k]][1]["momentum_buffer"]) for k in batch])

        ahead = {}
        chosen = [params[i] for i in own]
        for item in orthogonal(chosen, fill, steps, group_matrices(chosen, self._groups)):
            if not isinstance(item, Batch):
                item.wait()
                continue
            for k, direction in zip(*item, strict=True):
                group, state = pairs[own[k]]
                parameter = params[own[k]]
                if group["row_beta"] is not None:
                    direction = _by_rows(direction, state["row_second_moment"])
                ahead[own[k]] = direction.to(parameter.dtype) * -_rate(group, parameter)
        return ahead


def _by_rows(direction: Tensor, second_moment: Tensor, beta: float | None = None) -> Tensor:
    """NorMuon: rows divided by their running root mean square (moved on by `beta`), norm as before."""
    direction = direction.to(second_moment.dtype)
    if beta is not None:
        second_moment.lerp_(direction.square().mean(dim=-1, keepdim=True), 1 - beta)
    even = direction / (second_moment.sqrt() + _ROW_EPS)
    before, after = (torch.linalg.matrix_norm(tensor, keepdim=True) for tensor in (direction, even))
    return even.mul_(before / (after + _ROW_EPS))


def _rate(group: dict[str, Any], parameter: Tensor) -> float:
    rows, columns = parameter.shape[-2:]
    return group["lr"] * SCALES[group["scale"]](rows, columns)

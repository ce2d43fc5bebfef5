"""A causal language model of transformers, cut into stages between its layers.

Nothing here knows an architecture. A stage is transformers' own model in which every part that belongs to another
stage hands its input on: its forward makes positions, rotary embeddings and masks as ever, for every layer by that
layer's number. The first stage is given tokens, the others `inputs_embeds`; the last ends with norm and head.
Where a mixture of experts is trained with its balance loss, what its routers did goes along (`auxiliary.py`).

Invariant: a cut model computes what the whole one does, to the last bit. That is tried when a model is cut
(`check_cut`), and a model whose forward does more than hand a hidden state from layer to layer is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from slipstream.errors import UserError, words_of
from slipstream.models.auxiliary import AddLoss, balance_loss, routed
from slipstream.models.config_json import require_transformers

PREFIX = "hf."  # of a stage's parameter names, before the name that transformers gives
_TRIED_TOKENS = 8


def build(described: Mapping[str, Any], vocab: int, weights: Path | None = None) -> nn.Module:
    """The whole model on the host in float32: of `weights`, a folder of safetensors, or random from torch's seed."""
    transformers = library()
    config = _config(described, vocab)
    try:
        if weights is None:  # neither way reads code or pickles of the folder
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                weights, config=config, dtype=torch.float32, use_safetensors=True, local_files_only=True
            )
    except Exception as error:  # a library's, of a config that a person wrote
        raise UserError(f"transformers makes no {config.model_type} of this: {words_of(error)}") from error
    return model.train()


def library() -> Any:
    require_transformers()
    import transformers

    return transformers


def _config(described: Mapping[str, Any], vocab: int) -> Any:
    """As described, for this vocabulary: marks whose number lies beyond it are left out."""
    given = ("model_type", "auto_map", "vocab_size")
    values = {key: value for key, value in described.items() if key not in given}
    kind = described.get("model_type")
    try:
        config = library().AutoConfig.for_model(kind, **values, vocab_size=vocab)
    except Exception as error:  # a library's, of a config that a person wrote
        raise UserError(f"transformers makes no config of {kind!r}: {words_of(error)}") from error
    for mark in ("pad_token_id", "bos_token_id", "eos_token_id"):
        number = getattr(config, mark, None)
        if isinstance(number, int) and number >= vocab:
            setattr(config, mark, None)
    return config


@dataclass(frozen=True)
class Balance:
    """Of a mixture of experts whose balance loss is trained with: `output_router_logits` in its config.json."""

    coefficient: float
    experts: int
    experts_per_token: int


class Parts:
    """Where the layers, the embedding, the head and what comes after the last layer are in a whole model."""

    def __init__(self, model: Any, place: str) -> None:
        self.model, self.place, self.base = model, place, model.base_model
        self.layers = self._layers()
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        if self.embedding is None or self.head is None:
            raise UserError(
                f"{self._called} has no embedding of tokens or no head that makes logits of them."
            )
        for part, role in ((self.embedding, "embedding"), (self.head, "head")):
            part.weight.slipstream_role = role  # names do not tell: each library has its own
        self.tail: list[nn.Module] = []
        self.balance: Balance | None = None
        self._before: list[str] = []
        self._look()

    @property
    def _called(self) -> str:
        return f"model.hf = '{self.place}' ({type(self.model).__name__})"

    @property
    def width(self) -> int:
        """Of the hidden state between layers."""
        return self.embedding.weight.shape[1]

    def recompute(self) -> None:
        """Keep no activations within a layer: its backward runs its forward again."""
        try:
            self.model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        except ValueError as error:
            raise UserError(f"train.activation_checkpointing: {words_of(error)} Drop it.") from error
        self.model.disable_input_require_grads()  # hooks that a copy cannot have, of use to frozen embeddings alone

    def _layers(self) -> list[nn.Module]:
        wanted = getattr(self.model.config, "num_hidden_layers", None)
        found = [
            child
            for child in self.base.children()
            if isinstance(child, nn.ModuleList) and len(child) == wanted
        ]
        if len(found) != 1:
            raise UserError(
                f"{self._called} has {len(found)} lists of {wanted} layers, and one is needed to cut it. Write its "
                "layers yourself: model.module."
            )
        return list(found[0])

    def _look(self) -> None:
        """One forward of a few tokens: the order of calls, whether it draws random numbers, and its loss."""
        order: list[nn.Module] = []
        children = [child for child in self.base.children() if not isinstance(child, nn.ModuleList)]
        hooks = [m.register_forward_pre_hook(lambda m, _: order.append(m)) for m in (*children, *self.layers)]
        tokens, random = _tried(self.model), torch.get_rng_state()
        try:
            with torch.no_grad():
                found = self.model(input_ids=tokens, labels=tokens)
        except Exception as error:  # sizes that do not fit each other show here
            raise UserError(f"{self._called} does not run: {words_of(error)}") from error
        finally:
            for hook in hooks:
                hook.remove()
        if not torch.equal(random, torch.get_rng_state()):
            torch.set_rng_state(random)
            raise UserError(
                f"{self._called} draws random numbers in its forward (dropout, or noise of a router): they are not "
                "replayed after a restart, and would depend on the stages. Set them to 0 in its config.json: "
                f"{', '.join(_randomness(self.model.config)) or 'dropout'}."
            )
        self._check_loss(found, tokens)
        first, last = order.index(self.layers[0]), order.index(self.layers[-1])
        self.tail = [module for module in order[last + 1 :] if _has_parameters(module)]
        names = {id(child): name for name, child in self.base.named_children()}
        self._before = [names[id(m)] for m in order[:first] if _has_parameters(m) and m is not self.embedding]

    def _check_loss(self, found: Any, tokens: Tensor) -> None:
        """What is trained is the cross entropy of the logits and a balance loss as we know it: transformers' own loss
        must be that."""
        logits = found.logits[:, :-1].float().flatten(0, 1)
        ours = functional.cross_entropy(logits, tokens[:, 1:].flatten())
        if getattr(found, "aux_loss", None) is not None:
            self.balance = balance = self._balance(found.router_logits)
            sums = routed(found.router_logits, balance.experts_per_token)
            ours = ours + balance.coefficient * balance_loss(sums, balance.experts_per_token)
        if not torch.allclose(found.loss.float(), ours, rtol=1e-5, atol=1e-6):
            more = (
                "a further loss" if self.balance is None else "a balance loss of experts that we do not know"
            )
            raise UserError(
                f"{self._called} adds {more} to the cross entropy ({found.loss:.6g} against {ours:.6g}). Set "
                "output_router_logits to false in its config.json, or train our own experts (model.preset, "
                "model.experts)."
            )

    def _balance(self, logits: Any) -> Balance:
        config = self.model.config
        chosen = getattr(config, "num_experts_per_tok", None)
        coefficient = getattr(config, "router_aux_loss_coef", None)
        if not logits or chosen is None or coefficient is None:
            raise UserError(
                f"{self._called} has a balance loss of experts, but does not say its router_aux_loss_coef, "
                "num_experts_per_tok or router logits. Set output_router_logits to false in its config.json."
            )
        return Balance(coefficient, logits[0].shape[-1], chosen)

    def check_cut(self) -> None:
        """Cut between all its layers it must compute what it computes whole."""
        if self._before:
            raise UserError(
                f"{self._called} uses {self._before[0]} between its embedding and its layers, so it cannot be cut. Set "
                "pipeline.schedule=emulate, or write its layers yourself: model.module."
            )
        tokens, count = _tried(self.model), len(self.layers)
        with torch.no_grad():
            whole = self.model(input_ids=tokens).logits
            x: Any = (tokens,)
            try:
                for index in range(count):
                    x = HuggingFaceStage(self, range(index, index + 1))(*x)
                    x = x if isinstance(x, tuple) else (x,)
            except (AttributeError, TypeError, RuntimeError, ValueError) as error:
                raise UserError(f"{self._called} cannot be cut: {words_of(error)}") from error
        if not torch.equal(x[0], whole):
            raise UserError(
                f"{self._called} computes something else when it is cut between its layers: its forward does more than "
                "hand a hidden state from layer to layer. Set pipeline.schedule=emulate, or write its layers yourself: "
                "model.module."
            )


def _tried(model: Any) -> Tensor:
    return torch.arange(_TRIED_TOKENS).unsqueeze(0) % model.config.vocab_size


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _randomness(config: Any) -> Iterator[str]:
    for key, value in config.to_dict().items():
        named = any(word in key for word in ("drop", "jitter", "noise"))
        if named and isinstance(value, float) and value > 0:
            yield key


class Passed(nn.Module):
    """In the place of a part that another stage has: hands its input on."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        for name, value in vars(part).items():  # a forward may ask a layer what kind it is
            if not name.startswith("_") and isinstance(value, str | int | float | bool):
                setattr(self, name, value)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


class HuggingFaceStage(nn.Module):
    """Layers `span` of a whole model, whose parameters it shares; the first with embedding, the last with the head.

    Trained with a balance loss, it takes and returns the sums of `auxiliary.routed` beside the hidden state. The last
    adds the loss in its backward, times `auxiliary_weight`: what the engine multiplies a microbatch's loss with.
    """

    def __init__(self, parts: Parts, span: range, auxiliary_weight: float = 1.0) -> None:
        super().__init__()
        self.first, self.last = span.start == 0, span.stop == len(parts.layers)
        elsewhere = [layer for index, layer in enumerate(parts.layers) if index not in span]
        if not self.first:
            elsewhere.append(parts.embedding)
        if not self.last:
            elsewhere += [*parts.tail, parts.head]
        kept: dict[int, Any] = {id(part): Passed(part) for part in elsewhere}
        kept |= {id(parameter): parameter for parameter in parts.model.parameters()}
        self.hf = copy.deepcopy(parts.model, kept)
        self.balance, self.auxiliary_weight = parts.balance, auxiliary_weight

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Those it holds, by their numbers."""
        found = next(c for c in self.hf.base_model.children() if isinstance(c, nn.ModuleList))
        return {str(i): layer for i, layer in enumerate(found) if not isinstance(layer, Passed)}

    def forward(self, x: Tensor, sums: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        given: dict[str, Any] = {"input_ids" if self.first else "inputs_embeds": x, "use_cache": False}
        balance = self.balance if self.training else None  # a validation asks for the cross entropy alone
        if self.balance is not None:
            given["output_router_logits"] = balance is not None
        found = self.hf(**given) if self.last else self.hf.base_model(**given)
        x = found.logits if self.last else found.last_hidden_state
        if balance is None:
            return x
        if sums is None:
            sums = torch.zeros(2, balance.experts, device=x.device)
        if found.router_logits:  # a stage may have no router
            sums = sums + routed(found.router_logits, balance.experts_per_token)
        if not self.last:
            return x, sums
        loss = balance.coefficient * balance_loss(sums, balance.experts_per_token)
        return AddLoss.apply(x, loss, self.auxiliary_weight)


def loaded(weights: Mapping[str, Tensor], described: Mapping[str, Any], vocab: int, place: str) -> nn.Module:
    """The whole model in one stage, tokens in and logits out. `weights` by the names of a stage."""
    parts = Parts(build(described, vocab), place)
    stage = HuggingFaceStage(parts, range(len(parts.layers)))
    stage.load_state_dict(dict(weights), strict=False)  # a tied weight is there once
    return stage.eval()


def write(
    weights: Mapping[str, Tensor],
    described: Mapping[str, Any],
    vocab: int,
    folder: Path,
    dtype: torch.dtype,
    end_of_document: int | None = None,
) -> str:
    """A folder that from_pretrained loads, written by transformers itself. `weights` by the names of a stage. Texts
    begin and end with `end_of_document`, as in training; None: as the file says."""
    transformers = library()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(_config(described, vocab), dtype=dtype)
    named = {name.removeprefix(PREFIX): tensor.to(dtype) for name, tensor in weights.items()}
    for name, parameter in model.named_parameters():
        if name not in named or named[name].shape != parameter.shape:
            seen = tuple(named[name].shape) if name in named else "missing"
            raise UserError(
                f"The run's {name} is {seen}, but its model needs {tuple(parameter.shape)}: cannot export."
            )
    if end_of_document is not None:
        for settings in (model.config, model.generation_config):
            settings.bos_token_id = settings.eos_token_id = end_of_document
    try:
        model.save_pretrained(folder, state_dict=named, safe_serialization=True)
    except SafetensorError as error:  # such as a full disk
        raise OSError(str(error)) from error
    return type(model).__name__

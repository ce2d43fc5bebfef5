"""A state tree on disk: tensors as safetensors, everything else as JSON. Invariant: nothing is ever unpickled.

A tree is nested dicts with string keys. Each leaf tensor is stored under its path
("optimizer/layers.0.mlp.up.weight/exp_avg") and the JSON tree keeps {"$tensor": path} in its place. A piece is one such
pair of files, written by one rank.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slipstream.errors import CheckpointError
from slipstream.formats import parse_json
from slipstream.pipeline.compact import Halves, whole
from slipstream.pipeline.messages import on_host
from slipstream.torch_private import tree_map
from slipstream.train.manifest import Digest

TENSOR = "$tensor"


def flatten(tree: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split a state tree into tensors by path and a JSON-able tree that refers to them."""
    tensors: dict[str, torch.Tensor] = {}

    def visit(node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, torch.Tensor):
            key = "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)
            tensors[key] = node
            return {TENSOR: key}
        if isinstance(node, dict):
            assert all(isinstance(key, str) for key in node), f"state keys must be strings: {list(node)[:5]}"
            return {key: visit(value, (*path, key)) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            return [visit(value, (*path, str(index))) for index, value in enumerate(node)]
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        raise CheckpointError(
            f"A checkpoint cannot hold {'/'.join(path)}: {type(node).__name__} is neither a tensor nor JSON. "
            "Keep tensors, numbers and strings in the state of optimizers and corrections."
        )

    return tensors, visit(tree, ())


def unflatten(node: Any, tensors: Callable[[str], torch.Tensor | None]) -> Any:
    """Put the tensors back; a tensor the caller declines (None) is left out of its dict."""
    if isinstance(node, list):
        return [unflatten(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    if node.keys() == {TENSOR}:
        return tensors(node[TENSOR])
    children = {key: unflatten(value, tensors) for key, value in node.items()}
    return {key: value for key, value in children.items() if value is not None or node[key] is None}


@dataclass(frozen=True)
class Snapshot:
    """A copy of a tree on the host; from a device it is on its way until `copied`."""

    tree: Any
    copied: torch.cuda.Event | None = None

    def complete(self) -> Any:
        if self.copied is not None:
            self.copied.synchronize()
        return tree_map(whole, self.tree)


class Copier:
    """Copies live trees to the host: from a GPU beside the computation, on a stream of its own, into pinned memory.

    The tensors must not be written before `Snapshot.copied`; the engine's `hold` sees to that on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, tree: Any) -> Snapshot:
        if self._stream is None:
            return Snapshot(tree_map(_copied, tree))
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            found = tree_map(_copied, tree)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Snapshot(found, event)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Halves):
        return Halves(_copied(leaf.high), _copied(leaf.low))
    return on_host(leaf) if isinstance(leaf, torch.Tensor) else leaf


def write_piece(folder: Path, name: str, tree: dict[str, Any]) -> dict[str, Digest]:
    """Write `name.safetensors` and `name.json`, whose contents are on disk when this returns.

    The .json appears last and whole, and with it a leader may give the folder another name: nothing is done there
    afterwards. What names are in the folder is for whoever commits it to sync.
    """
    tensors, scalars = flatten(tree)
    weights, text = folder / f"{name}.safetensors", folder / f"{name}.json"
    try:
        save_file(_unshared(tensors), weights)
        sync(weights)
        stored = digest(weights)
        draft = folder / f".{name}.json"
        about = {"tree": scalars, "files": {weights.name: asdict(stored)}}
        draft.write_text(json.dumps(about), encoding="utf-8")
        sync(draft)
        files = {weights.name: stored, text.name: digest(draft)}
        draft.rename(text)
        return files
    except (OSError, SafetensorError) as error:
        weights.unlink(missing_ok=True)
        raise CheckpointError(f"'{weights}' could not be written: {error}.") from error


def read_piece(folder: Path, name: str, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Read a piece back; `wanted(path)` says which tensors are needed here."""
    weights, text = folder / f"{name}.safetensors", folder / f"{name}.json"
    try:
        tree = parse_json(text.read_text(encoding="utf-8"))["tree"]
        with safe_open(weights, framework="pt") as file:
            return unflatten(tree, lambda key: file.get_tensor(key) if wanted(key) else None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"'{weights}' is damaged: {error}.") from error


def digest(path: Path) -> Digest:
    with path.open("rb") as file:
        return Digest(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """safetensors refuses tensors that share memory (two banks that still hold the same weights)."""
    seen: set[int] = set()
    out: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        shared = pointer in seen or not tensor.is_contiguous() or tensor.is_cuda
        out[key] = tensor.detach().cpu().clone().contiguous() if shared else tensor.detach()
        if tensor.numel():
            seen.add(pointer)
    return out

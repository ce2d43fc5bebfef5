"""What a committed checkpoint says of itself, without its tensors: it is read before torch is imported, too."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.errors import CheckpointError
from slipstream.formats import parse_json

FORMAT = "slipstream-checkpoint"
VERSION = 1
LARGEST_STEP = 2**53  # the last whole number that a float counts to
NAME = re.compile(r"step-(\d+)")
# No separators: a manifest cannot point outside its folder.
_PIECE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Digest:
    """What a finished file looks like."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Of one checkpoint."""

    step: int
    pieces: tuple[str, ...]
    files: dict[str, Digest]
    meta: dict[str, Any]

    def says(self, key: str, kind: type[T]) -> T:
        """What it says of its run under `key`."""
        found = self.meta.get(key)
        if not isinstance(found, kind) or isinstance(found, bool) or (isinstance(found, int) and found < 0):
            raise CheckpointError(
                f"The checkpoint of step {self.step} is not one of a run: it says {key} = {found!r}."
            )
        return found


def manifest(path: Path) -> Manifest:
    """Read and check a manifest, without reading the pieces."""
    file = path / "manifest.json"
    try:
        body = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"'{path}' is not a checkpoint: it has no manifest.json.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{file}' is damaged: {error}.") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"'{path}' was not written by slipstream.")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"'{path}' has format version {body.get('version')!r}; this one reads {VERSION}."
        )
    if sealed({key: value for key, value in body.items() if key != "seal"}) != body:
        raise CheckpointError(f"'{file}' is damaged: its seal does not match its content.")
    try:
        return _parsed(body, file)
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"'{file}' is not a manifest of ours: {type(error).__name__} {error}."
        ) from None


def _parsed(body: dict[str, Any], file: Path) -> Manifest:
    if any(not _PIECE.fullmatch(name) for name in (*body["files"], *body["pieces"])):
        raise CheckpointError(f"'{file}' names files outside its folder.")
    files = {name: Digest(value["bytes"], value["sha256"]) for name, value in body["files"].items()}
    for piece in body["pieces"]:
        if not {f"{piece}.json", f"{piece}.safetensors"} <= files.keys():
            raise CheckpointError(f"'{file}' has no checksums for the piece '{piece}'.")
    step, named = body["step"], NAME.fullmatch(file.parent.name)
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= LARGEST_STEP:
        raise CheckpointError(f"'{file}' is of step {step!r}, which is no step of a run.")
    if named is not None and int(named[1]) != step:
        raise CheckpointError(f"'{file}' is of step {step}, and its folder is called '{named[0]}'.")
    if not isinstance(body["meta"], dict):
        raise CheckpointError(f"'{file}' says nothing about its run.")
    return Manifest(step, tuple(body["pieces"]), files, body["meta"])


def sealed(body: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return body | {"seal": hashlib.sha256(text.encode()).hexdigest()}

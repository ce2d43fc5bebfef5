"""What a run was made by: versions, the commit, and a fingerprint of the code itself.

A commit is known only in a checkout; the fingerprint is of the files that run, so it is always there.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream import __version__

HOME = Path(__file__).parents[1]
DIRTY = "-dirty"
PACKAGES = ("numpy", "pytorch-optimizer", "safetensors", "tokenizers")


def versions(*more: str) -> dict[str, str | None]:
    """Of this package, which may not be installed, of those that decide its numbers, and of `more`; None: not there."""
    found: dict[str, str | None] = {"slipstream": __version__}
    found |= {name: _version(name) for name in (*PACKAGES, *more)}
    found["torch"] = str(torch.__version__)
    if torch.cuda.is_available() and dist.is_nccl_available():
        from torch.cuda import nccl

        found["nccl"] = ".".join(str(part) for part in nccl.version())
    return found


@dataclass(frozen=True)
class Code:
    """The package that runs: by the commit of its checkout, and by its files."""

    commit: str | None
    source: str


@cache  # as it was when the first run of this process asked: later edits and commits are not what runs
def code(home: Path = HOME) -> Code:
    """Both are of one moment, so that they name the same code."""
    return Code(commit(home), source_fingerprint(home))


def commit(home: Path = HOME) -> str | None:
    """Of the checkout this package is run from, with a mark where the package differs from it; None outside of one.

    Of the other files only pyproject.toml counts: none of them runs.
    """
    git = ["git", "--no-optional-locks", "-C", str(home)]
    parts = [".", "../../pyproject.toml"] if (home.parents[1] / "pyproject.toml").is_file() else ["."]
    words = [
        "status",
        "--porcelain=v2",
        "--branch",
        "--no-ahead-behind",
        "--untracked-files=all",
        "--",
        *parts,
    ]
    try:
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, timeout=10
        )
        found = subprocess.run([*git, *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if tracked.returncode or found.returncode:
        return None
    lines = found.stdout.splitlines()
    head = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    differs = any(not line.startswith("# ") for line in lines)
    return None if head == "(initial)" else f"{head}{DIRTY if differs else ''}"


def source_fingerprint(home: Path = HOME) -> str:
    """Of the Python files of the package as they lie on the disk."""
    return fingerprint({path.relative_to(home).as_posix(): path.read_bytes() for path in home.rglob("*.py")})


def fingerprint(files: Mapping[str, bytes]) -> str:
    """SHA-256 over the name and bytes of every file, in the order of their names."""
    total = hashlib.sha256()
    for name in sorted(files):
        text = files[name]
        total.update(f"{len(name.encode())} {len(text)} ".encode() + name.encode() + text)
    return total.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""What a run was made by: versions, the commit, and a fingerprint of the code itself.

A commit is known only in a checkout; the fingerprint is of the files that run, so it is always there.
"""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream import __version__

HOME = Path(__file__).parents[1]
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


def commit(home: Path = HOME) -> str | None:
    """Of the checkout this package is run from, with a mark where files differ from it; None outside of one."""
    git = ["git", "-C", str(home)]
    words = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, timeout=10
        )
        found = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if tracked.returncode == 0 and found.returncode == 0 else None


@cache  # as it was when the first run of this process asked: later edits are not what runs
def source_fingerprint(home: Path = HOME) -> str:
    """SHA-256 over the name and bytes of every Python file of the package, in the order of their names."""
    total = hashlib.sha256()
    for path in sorted(home.rglob("*.py"), key=lambda path: path.relative_to(home).as_posix()):
        name, text = path.relative_to(home).as_posix().encode(), path.read_bytes()
        total.update(f"{len(name)} {len(text)} ".encode() + name + text)
    return total.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

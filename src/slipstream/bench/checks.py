"""What is asked before anything is measured: that results can be written, and that there is a GPU if one is named."""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream.errors import UserError


def make_room(path: Path | None) -> None:
    """Make the folder of a file that will be written; refuse what cannot be one."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{path} is a folder. Name a file, say {path / 'result.json'}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Name another place.") from None


def check_device(device: str) -> None:
    """`cpu`, or `cuda`, perhaps with a number, where there is a GPU."""
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: choose cpu or cuda.")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device is {device}, and torch sees no GPU. Set --device cpu.")

"""Other places that step events can go to, on request: TensorBoard and Weights & Biases."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from slipstream.config import Config, to_toml
from slipstream.errors import UserError, install
from slipstream.metrics.record import Tracker


def open_trackers(config: Config, folder: Path, step: int) -> tuple[Tracker, ...]:
    """For a run that goes on after `step`."""
    made: list[Tracker] = []
    for name in config.train.trackers:
        try:
            made.append(
                _TensorBoard(config, folder, step) if name == "tensorboard" else _WandB(config, folder)
            )
        except ImportError:
            raise UserError(f"train.trackers names {name}, which is not installed. {install(name)}") from None
    return tuple(made)


def _scalars(event: dict[str, Any]) -> dict[str, float]:
    kind = event["event"]
    if kind not in ("step", "validation"):
        return {}
    return {
        f"{kind}/{name}": float(value)
        for name, value in event.items()
        if name not in ("step", "time") and isinstance(value, (int, float))
    }


class _TensorBoard:
    def __init__(self, config: Config, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What was told of later steps, before a kill, is hidden.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        title = " ".join([config.run.name or folder.name, *(f"#{tag}" for tag in config.run.tags)])
        self._writer.add_text("run", f"{title}\n\n```toml\n{to_toml(config)}\n```", step)

    def log(self, event: dict[str, Any]) -> None:
        for name, value in _scalars(event).items():
            self._writer.add_scalar(name, value, event["step"])

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, config: Config, folder: Path) -> None:
        import wandb

        self._run = wandb.init(
            project="slipstream",
            name=config.run.name or folder.name,
            tags=config.run.tags or None,
            dir=str(folder),
            config=config.model_dump(),
            id=_lasting_id(folder),
            resume="allow",
        )

    def log(self, event: dict[str, Any]) -> None:
        if scalars := _scalars(event):
            self._run.log(scalars, step=event["step"])

    def close(self) -> None:
        self._run.finish()


def _lasting_id(folder: Path) -> str:
    """The same for every start of a run, so that a resumed one goes on in its own page."""
    kept = folder / "wandb-id"
    if not kept.exists():
        kept.write_text(uuid.uuid4().hex[:12])
    return kept.read_text()

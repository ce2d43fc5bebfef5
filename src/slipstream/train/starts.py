"""The starts of a run, synchronous or fine, in updates: it keeps them when it is made longer, of which a share would be
another number, and might lead back into a start that is over.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import Config
from slipstream.config.settings import updates
from slipstream.errors import CheckpointError
from slipstream.train import fine
from slipstream.train.manifest import Manifest


@dataclass(frozen=True)
class Starts:
    """Updates of each; None: what the config says, as of a run that has had none."""

    fine: int | None = None
    synchronous: int | None = None

    @classmethod
    def of(cls, config: Config) -> Starts:
        return cls(fine.length(config), updates(config.optim.sync_start, config.train.steps))

    @classmethod
    def had(cls, manifest: Manifest, stored: Config) -> Starts:
        """Those of the run that wrote a checkpoint, whose config was `stored`."""
        asked = vars(cls.of(stored))
        if "starts" in manifest.meta:
            told = manifest.says("starts", dict)
        else:  # of an earlier version
            told = {"fine": manifest.says("fine_updates", int)} if "fine_updates" in manifest.meta else {}
        if told.keys() - asked.keys() or not all(type(count) is int for count in told.values()):
            raise CheckpointError(
                f"The checkpoint of step {manifest.step} is not one of a run: it says starts = {told!r}."
            )
        return cls(**{**asked, **told})

    def where_asked_alike(self, stored: Config, config: Config) -> Starts:
        """None of a start that is asked for in other words now (a fork's own, or dropped by run.switch)."""
        return Starts(
            self.fine if stored.pipeline.fine_start == config.pipeline.fine_start else None,
            self.synchronous if stored.optim.sync_start == config.optim.sync_start else None,
        )

    def kept(self, config: Config) -> Config:
        """`config` with these, as numbers of updates."""
        if self.fine is not None:
            config = config.changed(pipeline={"fine_start": float(self.fine)})
        if self.synchronous is not None:  # a fork may be shorter
            most = config.train.steps - updates(config.optim.sync_finish, config.train.steps)
            config = config.changed(optim={"sync_start": float(min(self.synchronous, most))})
        return config

    def notes(self, config: Config, step: int) -> list[str]:
        """Where `config`, which goes on from `step`, would have another number of updates that are still to come."""
        asked, kept = Starts.of(config), Starts.of(self.kept(config))
        pairs = [("fine", kept.fine, asked.fine), ("synchronous", kept.synchronous, asked.synchronous)]
        return [
            f"The {name} start ends with update {had}, as in the run so far, and not with {share}, as its share of "
            f"{config.train.steps} updates would."
            for name, had, share in pairs
            if had != share and step < max(had or 0, share or 0)
        ]

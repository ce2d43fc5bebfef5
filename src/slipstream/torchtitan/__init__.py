"""torchtitan on Schedule2BW: its models, data, parallelism, checkpoints and metrics, our schedule and optimizers.

with_2bw(config)                  -> any `Trainer.Config` of torchtitan, trained without a pipeline flush   configs.py
--module slipstream.torchtitan.X  -> torchtitan's configs of model X, each through `with_2bw`                X.py
Trainer2BW                        -> torchtitan's trainer with a training step of its own               trainer_2bw.py
"""

import torch

from slipstream.errors import UserError


def check_torch(version: str) -> None:
    """Before anything of torchtitan is imported: its own error names a class (DataParallelMeshDims) that torch 2.11 has
    not and no one has heard of. docs/torchtitan.md has the pairs of versions."""
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 13):
        raise UserError(
            f"torchtitan 0.3.0 cannot be imported with torch {version}. Install torch 2.14.1, with which its own "
            "pipelines run too, or torch 2.13."
        )


check_torch(torch.__version__)

from slipstream.torchtitan.configs import with_2bw  # noqa: E402
from slipstream.torchtitan.settings import Settings  # noqa: E402
from slipstream.torchtitan.trainer_2bw import Trainer2BW  # noqa: E402

__all__ = ["Settings", "Trainer2BW", "with_2bw"]

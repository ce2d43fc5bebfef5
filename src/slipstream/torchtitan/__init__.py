"""torchtitan on Schedule2BW: its models, data, parallelism, checkpoints and metrics, our schedule and optimizers.

with_2bw(config)                  -> any `Trainer.Config` of torchtitan, trained without a pipeline flush   configs.py
--module slipstream.torchtitan.X  -> torchtitan's configs of model X, each through `with_2bw`                X.py
Trainer2BW                        -> torchtitan's trainer with a training step of its own               trainer_2bw.py
"""

import torch

from slipstream.torchtitan.versions import check_torch

check_torch(torch.__version__)

from slipstream.torchtitan.configs import with_2bw  # noqa: E402
from slipstream.torchtitan.settings import Settings  # noqa: E402
from slipstream.torchtitan.trainer_2bw import Trainer2BW  # noqa: E402

__all__ = ["Settings", "Trainer2BW", "with_2bw"]

"""torch's accelerator, as torchtitan asks for it when it is imported: none, unless TITAN_DEVICE is cuda."""

import os

import torch._utils

ON_CPU = os.environ.get("TITAN_DEVICE", "cpu") == "cpu"
if ON_CPU:
    torch._utils._get_available_device_type = lambda: "cpu"

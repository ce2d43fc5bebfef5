"""torch's accelerator, as torchtitan asks for it when it is imported: none."""

import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"

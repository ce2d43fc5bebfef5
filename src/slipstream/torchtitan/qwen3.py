"""torchtitan's configs of qwen3 on Schedule2BW, under their names there: `--module slipstream.torchtitan.qwen3`."""

from slipstream.torchtitan.configs import configs_of

globals().update(configs_of("qwen3"))

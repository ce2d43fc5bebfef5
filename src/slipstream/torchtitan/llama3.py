"""torchtitan's configs of llama3 on Schedule2BW, under their names there: `--module slipstream.torchtitan.llama3`."""

from slipstream.torchtitan.configs import configs_of

globals().update(configs_of("llama3"))

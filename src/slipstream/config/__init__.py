"""The whole run as one typed tree: TOML plus dotted overrides, every problem reported at once."""

from slipstream.config.load import from_tree, load
from slipstream.config.resolve import resolve
from slipstream.config.settings import Config, Reach
from slipstream.config.write import Change, changes, describe, to_toml

__all__ = ["Change", "Config", "Reach", "changes", "describe", "from_tree", "load", "resolve", "to_toml"]

"""A `Config` as TOML, as a table of keys, and as the difference from another one.

Invariant: `load(write(config)) == config`: the file in a run folder can start the run again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from slipstream.config.settings import Config, Reach
from slipstream.formats import toml_value


@dataclass(frozen=True, slots=True)
class Key:
    """One setting, for `slipstream config`."""

    name: str
    type: str
    default: Any
    meaning: str
    reach: Reach


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs between a stored run and the one asked for."""

    name: str
    stored: Any
    asked: Any

    def __str__(self) -> str:
        had = "none" if self.stored is None else toml_value(self.stored)
        now = "and now it is not set" if self.asked is None else f"asked for {toml_value(self.asked)}"
        return f"{self.name}: the run has {had}, {now}"


@cache
def describe() -> tuple[Key, ...]:
    """Every key with its type, default and meaning, in the order of the tree."""
    found = []
    for section, info in Config.model_fields.items():
        settings = info.annotation
        assert isinstance(settings, type)
        assert issubclass(settings, BaseModel)
        for name, field in settings.model_fields.items():
            extra = field.json_schema_extra
            assert isinstance(extra, dict)
            found.append(
                Key(
                    name=f"{section}.{name}",
                    type=_type_name(field.annotation),
                    default=field.get_default(call_default_factory=True),
                    meaning=field.description or "",
                    reach=Reach(str(extra["reach"])),
                )
            )
    return tuple(found)


def to_toml(config: Config) -> str:
    """The resolved run as TOML, one comment per key; a value of None is left out (TOML has no null)."""
    meanings = {key.name: key.meaning for key in describe()}
    lines: list[str] = []
    for section, values in config.model_dump().items():
        lines.append(f"[{section}]")
        for name, value in values.items():
            comment = f"  # {meanings[f'{section}.{name}']}"
            lines.append(
                f"# {name} ={comment}" if value is None else f"{name} = {toml_value(value)}{comment}"
            )
        lines.append("")
    return "\n".join(lines)


def changes(stored: Config, asked: Config) -> list[Change]:
    """The keys that would change the trajectory, with both values."""
    old, new = flat(stored), flat(asked)
    return [
        Change(key.name, old[key.name], new[key.name])
        for key in describe()
        if key.reach is Reach.TRAJECTORY and old[key.name] != new[key.name]
    ]


def flat(config: Config) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, values in config.model_dump().items()
        for name, value in values.items()
    }


def _type_name(annotation: Any) -> str:
    text = (
        annotation.__name__
        if isinstance(annotation, type) and not hasattr(annotation, "__args__")
        else str(annotation)
    )
    text = re.sub(r"Annotated\[(.*), BeforeValidator.*\]$", r"\1", text)
    text = text.replace("typing.", "").replace("Any", "any").replace(" | None", "")
    text = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace("'", "").replace(", ", " | "), text)
    return text.removeprefix("Union[").removesuffix("]").replace(", ", " | ") if "Union[" in text else text

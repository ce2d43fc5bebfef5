"""The errors a person sees. A `UserError` says what is wrong, the values seen, and what to change.

The command line prints a `UserError` without a traceback and exits with 2; anything else is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution


class UserError(Exception):
    """A mistake the user can correct: the message says how."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest of what is known, with a space before it; nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def words_of(error: BaseException) -> str:
    """What a library says, on one line and no longer than a reader likes."""
    return " ".join(str(error).split())[:300] or type(error).__name__


class ConfigError(UserError):
    """Every problem of a configuration, reported at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} in the configuration:\n{lines}")


class DataError(UserError):
    """A data file or folder that cannot be used."""


class InUseError(UserError):
    """A run folder that another process is writing."""


class DiskError(UserError):
    """A disk that is full or may not be written."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or belongs to something else."""


class StoppedError(UserError):
    """A second request to stop: the run was ended without saving."""


class StageError(UserError):
    """A pipeline stage that died, stalled or answered with something unexpected."""


class HealthError(StageError):
    """A training that is not well: started again from its last state it would end the same way."""


class LostRankError(StageError):
    """Ranks that died, stood still or failed; `ranks` are their numbers in the job."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple:
        return LostRankError, (str(self), self.ranks)


def install(extra: str) -> str:
    """How to install what an optional part needs, in a clone of this package or beside a wheel of it."""
    try:
        origin = distribution("slipstream").read_text("direct_url.json") or ""
    except PackageNotFoundError:
        origin = '"editable"'  # a checkout that is used without being installed
    if "editable" in origin:
        return f"Install it in the checkout: pip install -e '.[{extra}]'."
    return f"Install it: pip install 'slipstream[{extra}]'."

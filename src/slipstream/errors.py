"""The errors a person sees. A `UserError` says what is wrong, the values seen, and what to change.

The command line prints a `UserError` without a traceback and exits with 2; anything else is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """A mistake the user can mend: the message says how."""


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


class StageError(UserError):
    """A pipeline stage that died, stalled or answered with something unexpected."""

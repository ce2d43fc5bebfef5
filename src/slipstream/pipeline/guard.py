"""Whether a schedule may still be used: one that failed, or was closed, says so to whoever calls it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from slipstream.errors import StageError, UserError


def refuse_in_hook(in_hook: bool) -> None:
    if in_hook:
        raise UserError(
            "after_update is called inside an update, which cannot wait for itself: use capture() there, and call "
            "step, drain, eval, state_dict and stopping outside."
        )


class Guard:
    """Around what a schedule does. An error inside is the end of it, and gets this stage's name."""

    def __init__(self, stage: int, in_hook: Callable[[], bool]) -> None:
        """`in_hook`: whether `after_update` runs, which may wait for nothing."""
        self._stage, self._in_hook = stage, in_hook
        self.failed: str | None = None  # why nothing more can be done
        self.closed = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if self.failed is not None:
            raise UserError(
                f"This schedule failed before ({self.failed}) and cannot go on. Make a new one and load a state."
            )
        if self.closed:
            raise UserError("This schedule was closed. Make a new one and load a state.")
        refuse_in_hook(self._in_hook())
        try:
            yield
        except StageError as error:
            if self.failed is not None:  # told by an inner call, with this stage's name
                raise
            self.failed = str(error)
            raise StageError(f"Stage {self._stage} {error}") from error.__cause__
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        self.failed = self.failed or f"{type(error).__name__}: {error}"

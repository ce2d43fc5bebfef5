"""The stage before and the stage behind, as their hosts are known to this one: a wire, and what came over it.

Shapes of messages are told to the stage behind, and what is begun, a group or an evaluation. Where devices do the
waiting (`in_stream.py`) notices decide what is queued, and are heeded in the order in which they were told. A wire also
says, at once, that its other end is gone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from slipstream.distributed.lost import words
from slipstream.distributed.wires import Wire, wait_readable
from slipstream.errors import StageError, UserError
from slipstream.pipeline.messages import Spec, decode, encode

_SHAPES, _EVALUATION, _GROUP = b"D", b"E", b"G"


class Neighbour:
    """One of them."""

    def __init__(self, stage: int, wire: Wire, timeout_seconds: float) -> None:
        self.stage = stage
        self.wire = wire
        self.timeout_seconds = timeout_seconds
        # By the first byte of a notice: what to do with the rest.
        self.heed: dict[bytes, Callable[[bytes], None]] = {}
        self._shapes: deque[Spec] = deque()
        self._evaluations: deque[Spec] = deque()
        # Groups that have begun, there and here; where devices do the waiting, a thread of theirs counts the first.
        self._begun = 0
        self.groups = 0
        self.heed[_SHAPES] = lambda rest: self._shapes.append(decode(rest))
        self.heed[_EVALUATION] = lambda rest: self._evaluations.append(decode(rest))
        self.heed[_GROUP] = self._heed_group

    def __str__(self) -> str:
        return f"stage {self.stage} (rank {self.wire.rank})"

    def tell_shapes(self, spec: Spec) -> None:
        """Of the activations of training, once."""
        self.wire.send(_SHAPES + encode(spec))

    def tell_evaluation(self, spec: Spec) -> None:
        """That one begins, and the shapes of its activations."""
        self.wire.send(_EVALUATION + encode(spec))

    def tell_group(self) -> None:
        """That one begins."""
        self.wire.send(_GROUP)

    def _heed_group(self, _: bytes) -> None:
        self._begun += 1

    def tell(self, notice: bytes, spec: Spec | None = None) -> None:
        self.wire.send(notice if spec is None else notice + encode(spec))

    def listen(self) -> None:
        """Heed what has been told."""
        while (message := self.wire.receive()) is not None:
            self.heed[message[:1]](message[1:])

    def hear_shapes(self, waiting: Waiting) -> Spec:
        waiting.until(
            lambda: bool(self._shapes or self._evaluations), self, "waited for the shapes of the output from"
        )
        self.refuse_evaluation()
        return self._shapes.popleft()

    def hear_evaluation(self, waiting: Waiting) -> Spec:
        waiting.until(
            lambda: bool(self._evaluations) or self._begun > self.groups, self, "waited for the evaluation of"
        )
        if not self._evaluations:
            raise self._apart("step", "eval")
        return self._evaluations.popleft()

    def refuse_evaluation(self) -> None:
        """In a step: where it evaluates, what it sends is no group's."""
        if self._evaluations:
            raise self._apart("eval", "step")

    def _apart(self, there: str, here: str) -> UserError:
        return UserError(
            f"{str(self).capitalize()} is in {there}, and this stage in {here}. Call eval on all ranks, as step: each "
            "stage has its part in it."
        )


class Waiting:
    """How a host waits for its neighbours: heeding whatever they tell meanwhile, and not for ever."""

    def __init__(self, neighbours: Sequence[Neighbour]) -> None:
        self._neighbours = list(neighbours)

    def until(self, arrived: Callable[[], bool], neighbour: Neighbour, what: str) -> None:
        """Wait for `arrived`, which a message of `neighbour` brings about."""
        started = time.monotonic()
        self._pause(0.0)
        while True:
            gone = neighbour.wire.gone  # before the look: a neighbour may tell its last and close
            if arrived():
                return
            seconds = time.monotonic() - started
            if gone:
                closed = ConnectionError("closed by the other end")
                raise broken(TimeoutError() if neighbour.wire.stalled else closed, seconds, neighbour, what)
            left = neighbour.timeout_seconds - seconds
            if left <= 0:
                raise broken(TimeoutError(), seconds, neighbour, what)
            self._pause(min(left, 1.0))

    @property
    def wires(self) -> list[Wire]:
        """Those that may still bring something."""
        return [neighbour.wire for neighbour in self._neighbours if not neighbour.wire.gone]

    def close(self) -> None:
        pass

    def _pause(self, seconds: float) -> None:
        """Until a neighbour tells something, and heed it."""
        wait_readable(self.wires, seconds)
        for neighbour in self._neighbours:
            neighbour.listen()


def broken(error: Exception, seconds: float, neighbour: Neighbour, what: str) -> StageError:
    """What to tell when a neighbour is gone or silent; the stage that tells it puts its own name in front."""
    if isinstance(error, TimeoutError) or seconds >= 0.9 * neighbour.timeout_seconds:
        reason = (
            f"no answer within the timeout of {neighbour.timeout_seconds:g} s. Is that stage stalled or slow?"
        )
    else:
        reason = f"{words(error)}. Did that stage die?"
    return StageError(f"{what} {neighbour} for {seconds:.1f} s in vain: {reason}")

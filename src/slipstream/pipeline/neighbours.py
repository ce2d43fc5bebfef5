"""The stage before and the stage behind, as their hosts are known to this one: a wire, and what came over it.

What a stage tells the one behind it: the shapes of a message, that a message has been put on its way, that it is ready
to take a gradient. Where devices do the waiting (`in_stream.py`) these notices decide what may be queued; everywhere
else only the shapes are told. Nothing is told the other way: a wire also says, at once, that its other end is gone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from slipstream.distributed.lost import words
from slipstream.distributed.wires import Wire, wait_readable
from slipstream.errors import StageError
from slipstream.pipeline.messages import Spec, decode, encode

_SHAPES, _SENT, _READY = b"D", b"S", b"R"
_LOOK_SECONDS = 0.0002  # between two looks at something that no wire tells


class Neighbour:
    """One of them. Counts are of all messages since the schedule was made."""

    def __init__(self, stage: int, wire: Wire, timeout_seconds: float) -> None:
        self.stage = stage
        self.wire = wire
        self.timeout_seconds = timeout_seconds
        self.sent = 0  # messages it has put on their way to this stage
        self.ready = 0  # gradients it is ready to take
        self._shapes: deque[Spec] = deque()

    def __str__(self) -> str:
        return f"stage {self.stage} (rank {self.wire.rank})"

    def tell_shapes(self, spec: Spec) -> None:
        self.wire.send(_SHAPES + encode(spec))

    def tell_sent(self) -> None:
        self.wire.send(_SENT)

    def tell_ready(self) -> None:
        self.wire.send(_READY)

    def listen(self) -> None:
        """Take in what has been told."""
        while (message := self.wire.receive()) is not None:
            if message == _SENT:
                self.sent += 1
            elif message == _READY:
                self.ready += 1
            else:
                assert message[:1] == _SHAPES, message[:8]
                self._shapes.append(decode(message[1:]))

    def hear_shapes(self, waiting: Waiting) -> Spec:
        waiting.until(lambda: bool(self._shapes), self, "waited for the shapes of the output from")
        return self._shapes.popleft()


class Waiting:
    """How a host waits: looking after what its neighbours ask for meanwhile, and not for ever."""

    def __init__(self, neighbours: Sequence[Neighbour]) -> None:
        self._neighbours = list(neighbours)
        self.attend: list[Callable[[], None]] = []  # what is looked after while this host waits

    def look_around(self) -> None:
        """Take in what the neighbours told, and do what has become possible by it."""
        for neighbour in self._neighbours:
            neighbour.listen()
        for attend in self.attend:
            attend()

    def pause(self) -> None:
        """A moment, less if a neighbour tells something."""
        wait_readable((n.wire for n in self._neighbours if not n.wire.gone), _LOOK_SECONDS)

    def until(self, arrived: Callable[[], bool], neighbour: Neighbour, what: str) -> None:
        """Wait for `arrived`, which a message of `neighbour` brings about."""
        started = time.monotonic()
        while True:
            self.look_around()
            if arrived():
                return
            seconds = time.monotonic() - started
            if neighbour.wire.gone:
                closed = ConnectionError("closed by the other end")
                raise broken(TimeoutError() if neighbour.wire.stalled else closed, seconds, neighbour, what)
            left = neighbour.timeout_seconds - seconds
            if left <= 0:
                raise broken(TimeoutError(), seconds, neighbour, what)
            # Any wire wakes: an answer to one neighbour may be what another one waits for.
            wait_readable((n.wire for n in self._neighbours if not n.wire.gone), min(left, 1.0))


def broken(error: Exception, seconds: float, neighbour: Neighbour, what: str) -> StageError:
    """What to tell when a neighbour is gone or silent; the stage that tells it puts its own name in front."""
    if isinstance(error, TimeoutError) or seconds >= 0.9 * neighbour.timeout_seconds:
        reason = (
            f"no answer within the timeout of {neighbour.timeout_seconds:g} s. Is that stage stalled or slow?"
        )
    else:
        reason = f"{words(error)}. Did that stage die?"
    return StageError(f"{what} {neighbour} for {seconds:.1f} s in vain: {reason}")

"""The stage before and the stage behind, as their hosts are known to this one: a wire, and what came over it.

Shapes of messages are told to the stage behind. Where devices do the waiting (`in_stream.py`) notices decide what is
queued, and are heeded in the order in which they were told. A wire also says, at once, that its other end is gone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from slipstream.distributed.lost import words
from slipstream.distributed.wires import Wire, wait_readable
from slipstream.errors import StageError
from slipstream.pipeline.messages import Spec, decode, encode

_SHAPES = b"D"
_LOOK_SECONDS = 0.0001  # between two looks at something that no wire tells


class Neighbour:
    """One of them."""

    def __init__(self, stage: int, wire: Wire, timeout_seconds: float) -> None:
        self.stage = stage
        self.wire = wire
        self.timeout_seconds = timeout_seconds
        # By the first byte of a notice: what to do with the rest.
        self.heed: dict[bytes, Callable[[bytes], None]] = {}
        self._shapes: deque[Spec] = deque()
        self.heed[_SHAPES] = lambda rest: self._shapes.append(decode(rest))

    def __str__(self) -> str:
        return f"stage {self.stage} (rank {self.wire.rank})"

    def tell_shapes(self, spec: Spec) -> None:
        self.wire.send(_SHAPES + encode(spec))

    def tell(self, notice: bytes, spec: Spec | None = None) -> None:
        self.wire.send(notice if spec is None else notice + encode(spec))

    def listen(self) -> None:
        """Heed what has been told."""
        while (message := self.wire.receive()) is not None:
            self.heed[message[:1]](message[1:])

    def hear_shapes(self, waiting: Waiting) -> Spec:
        waiting.until(lambda: bool(self._shapes), self, "waited for the shapes of the output from")
        return self._shapes.popleft()


class Waiting:
    """How a host waits: looking after what its neighbours ask for meanwhile, and not for ever."""

    def __init__(self, neighbours: Sequence[Neighbour]) -> None:
        self._neighbours = list(neighbours)
        # What is looked after while this host waits; each says whether it waits for the device.
        self.attend: list[Callable[[], bool]] = []

    def look_around(self) -> bool:
        """Heed what the neighbours told, and do what has become possible. Whether something waits for the device."""
        for neighbour in self._neighbours:
            neighbour.listen()
        waiting = [attend() for attend in self.attend]
        return any(waiting)

    def pause(self) -> None:
        """A moment, for something that no wire tells."""
        time.sleep(_LOOK_SECONDS)

    def until(self, arrived: Callable[[], bool], neighbour: Neighbour, what: str) -> None:
        """Wait for `arrived`, which a message of `neighbour` brings about."""
        started = time.monotonic()
        while True:
            device_works = self.look_around()
            if arrived():
                return
            seconds = time.monotonic() - started
            if neighbour.wire.gone:
                closed = ConnectionError("closed by the other end")
                raise broken(TimeoutError() if neighbour.wire.stalled else closed, seconds, neighbour, what)
            left = neighbour.timeout_seconds - seconds
            if left <= 0:
                raise broken(TimeoutError(), seconds, neighbour, what)
            if device_works:
                self.pause()
            else:  # any wire wakes: an answer to one neighbour may be what another one waits for
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

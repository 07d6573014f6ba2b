"""Ctrl-C and termination of a launcher, taken at moments of its choosing.

A launcher that is torn out of the middle of a start or of its cleaning up leaves
processes behind; so signals are noted, and looked at between two events.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import final


@final
@dataclass
class Interruption:
    """Signals that the launcher got; looked at between events, never inside one."""

    received: list[int] = field(default_factory=list)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Note a signal (is a signal handler)."""
        self.received.append(signum)

    def check(self) -> None:
        """Raise what an interrupted program raises, if there was a signal."""
        if not self.received:
            return
        if self.received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received[0])


@contextlib.contextmanager
def noted_interruption() -> Iterator[Interruption]:
    """Note SIGINT, SIGTERM and SIGHUP for the length of a block.

    Signals that are ignored stay so (a job under `nohup`). Outside the main thread
    nothing is caught, as Python allows it there only.
    """
    interruption = Interruption()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, interruption)
    try:
        yield interruption
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

"""Which worker failed first, and how to say it: judged from exit statuses and logs.

Reads logs, starts and ends nothing. When one worker dies its peers fail in their next
collective, so of several failures the one to name is not always the first seen.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jdlb.errors import RunError, UserError

_TAIL_BYTES = 16_384
_TAIL_LINES = 12
_LINE_CHARACTERS = 300

# How gloo, NCCL and JAX's coordination service report that somebody else is gone.
_PEER_GONE = re.compile(
    r"gloo \w+ failed|nccl|connection (closed|reset|refused)|coordination service"
    r"|coordinationservice|heartbeat|socket closed",
    re.IGNORECASE,
)
# Information and warnings of the C++ runtime, "W0000 00:00:1700000000.0 ...", and
# what gloo says on every start.
_CHATTER = re.compile(r"[IW]\d{4} \d\d:|\[Gloo\] Rank \d+ is connected")


@dataclass(frozen=True)
class Ending:
    """How a worker's process ended: exit status, or minus the signal's number."""

    worker: int
    status: int
    # Monotonic clock, seconds.
    time: float
    log: Path


class WorkerFailed(RuntimeError):
    """A worker ended otherwise than with status 0; the message names it."""

    def __init__(self, ending: Ending, lines: Sequence[str]) -> None:
        """From the ending and the last lines of the worker's log."""
        self.ending = ending
        log = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
        super().__init__(
            f"worker {ending.worker} {describe(ending.status)};"
            f" the end of {ending.log}:\n{log}"
        )


def describe(status: int) -> str:
    """An exit status in words.

    >>> describe(3), describe(-9)
    ('ended with exit status 3', 'was killed by SIGKILL')
    """
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def tail(log: Path) -> list[str]:
    """The last lines of a log that say something."""
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.rstrip()[:_LINE_CHARACTERS] for line in text.splitlines()]
    return [line for line in lines if line and not _CHATTER.match(line)][-_TAIL_LINES:]


def _blames_others(ending: Ending, lines: Sequence[str]) -> bool:
    """Whether the worker failed because another one was gone.

    Signals are a cause of their own, but for the abort with which JAX's runtime ends
    a process that has lost the others.
    """
    if ending.status < 0 and ending.status != -signal.SIGABRT:
        return False
    return any(_PEER_GONE.search(line) for line in lines)


def job_error(failures: Sequence[Ending]) -> UserError | RunError | WorkerFailed:
    """The exception for a job with these failures, of which there is at least one.

    Names the first of those that do not blame others, the first of all where every
    one does. Exit status 2 with a last line `error: ...` is a `UserError` of a
    worker, status 1 likewise a `RunError`; both are handed on as they are.
    """
    tails = {failure.worker: tail(failure.log) for failure in failures}
    first = min(
        failures,
        key=lambda failure: (
            _blames_others(failure, tails[failure.worker]),
            failure.time,
        ),
    )
    lines = tails[first.worker]
    kind = {1: RunError, 2: UserError}.get(first.status)
    if kind and lines and lines[-1].startswith("error: "):
        return kind(lines[-1].removeprefix("error: "))
    return WorkerFailed(first, lines)

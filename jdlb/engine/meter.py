"""Busy and wait time of this process's workers, measured without stopping the loop.

Busy time of step k runs from "the reduced result of step k-1 is available on this
worker" to "this worker's contribution k is ready": its own input, update, forward and
backward. One thread a worker blocks on small outputs that are never donated, so the
main loop goes on dispatching. Dispatch is asynchronous: a clock around the calls would
measure nothing, and one around the whole step would measure the slowest worker on all.
"""

import dataclasses
import queue
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np


@runtime_checkable
class Pending(Protocol):
    """What is ready at some time: of `jax.Array`, the part that a meter uses."""

    def block_until_ready(self) -> Any:
        """Return when it is ready."""
        ...


@dataclasses.dataclass(frozen=True)
class WorkerTimes:
    """One worker's measured steps of one round (axis s), in seconds."""

    busy: tuple[float, ...]
    wait: tuple[float, ...]
    input: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class _Watch:
    """One dispatched step, as one worker's thread sees it."""

    contributed: Pending
    reduced: Pending
    input_seconds: float
    measured: bool


class _WorkerClock:
    """The thread that waits for one worker."""

    def __init__(self, worker: int):
        self._queue: queue.Queue[_Watch | None] = queue.Queue()
        self._busy: list[float] = []
        self._wait: list[float] = []
        self._input: list[float] = []
        self._available = time.perf_counter()
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"jdlb-meter-{worker}", daemon=True
        )
        self._thread.start()

    def begin(self) -> None:
        """A round begins on a drained pipeline: now is the first start."""
        self._busy, self._wait, self._input = [], [], []
        self._available = time.perf_counter()

    def put(self, watch: _Watch) -> None:
        self._queue.put(watch)

    def end(self) -> WorkerTimes:
        """Wait until all steps put so far are done."""
        self._queue.join()
        if self._error is not None:
            raise self._error
        return WorkerTimes(tuple(self._busy), tuple(self._wait), tuple(self._input))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (watch := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._watch(watch)
            # A peer that died, or a deleted array; `end` raises it in the main thread.
            except RuntimeError as error:
                self._error = error
            finally:
                self._queue.task_done()

    def _watch(self, watch: _Watch) -> None:
        start = self._available
        watch.contributed.block_until_ready()
        contributed = time.perf_counter()
        watch.reduced.block_until_ready()
        self._available = time.perf_counter()
        if watch.measured:
            self._busy.append(contributed - start)
            self._wait.append(self._available - contributed)
            self._input.append(watch.input_seconds)


class Meter:
    """Clocks of the local workers; used by the main thread alone.

    >>> with Meter([0]) as meter:
    ...     meter.begin_round()
    ...     meter.end_round()
    (WorkerTimes(busy=(), wait=(), input=()),)
    """

    def __init__(self, local_workers: Sequence[int]):
        self._clocks = tuple(_WorkerClock(w) for w in local_workers)

    def begin_round(self) -> None:
        """Forget the last round; the pipeline must be drained."""
        for clock in self._clocks:
            clock.begin()

    def watch(
        self,
        contributed: Sequence[Pending],
        reduced: Sequence[Pending],
        input_seconds: float,
        measured: Sequence[bool],
    ) -> None:
        """Follow one dispatched step.

        Args:
          contributed, reduced: an array a local worker, ready with its contribution
            and with the reduced result; never donated.
          input_seconds: how long the loop waited for this step's input.
          measured: per local worker, whether the step counts (not the first of a new
            shape, not a partial batch).
        """
        for clock, c, r, m in zip(
            self._clocks, contributed, reduced, measured, strict=True
        ):
            clock.put(_Watch(c, r, input_seconds, m))

    def end_round(self) -> tuple[WorkerTimes, ...]:
        """Drain, and return the times of each local worker.

        Raises:
          RuntimeError: as JAX raised it: a step failed, a peer died.
        """
        return tuple(clock.end() for clock in self._clocks)

    def close(self) -> None:
        """End the threads."""
        for clock in self._clocks:
            clock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def spread_seconds(times: Sequence[float]) -> float:
    """The distance between the quartiles; 0 without a measure."""
    if not times:
        return 0.0
    low, high = np.percentile(times, [25, 75])
    return float(high - low)

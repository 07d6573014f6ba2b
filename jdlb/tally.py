"""What a round amounted to: sums over its steps, and the table of all workers' times.

Pure bookkeeping between the engine, which measures, and the controller and the records,
which want one row a round. Used by `trainer` alone.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from jdlb.balance.allocation import Allocation
from jdlb.balance.policies.protocol import Observation
from jdlb.engine.meter import WorkerTimes, spread_seconds
from jdlb.engine.step import Compilation, StepOutcome


class Tally:
    """Sums over steps from the statistics of their global batches."""

    def __init__(self, metric_names: tuple[str, ...], workers: int):
        self._names = ("loss", *metric_names)
        self._sums = np.zeros(len(self._names))
        self._skipped_by_worker = np.zeros(workers, np.int64)
        self.examples = 0
        self.skipped = 0

    def add(self, outcome: StepOutcome) -> None:
        """Count one step."""
        statistics = outcome.statistics
        if outcome.counted:
            self.examples += int(statistics.examples)
            self._sums += [statistics.loss_sum, *statistics.metric_sums]
        else:
            self.skipped += 1
            self._skipped_by_worker += np.asarray(statistics.bad, np.int64)

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the examples of the steps that counted; 0 without any."""
        means = self._sums / max(self.examples, 1)
        return dict(zip(self._names, means.tolist(), strict=True))

    @property
    def skipped_by_worker(self) -> tuple[int, ...]:
        """How many skipped steps each worker caused, [W]."""
        return tuple(self._skipped_by_worker.tolist())


@dataclasses.dataclass(frozen=True)
class RoundTable:
    """What one round was like on every worker: one entry a worker, times in seconds.

    Busy, input and wait are sums over the measured steps; median and spread are those
    of the busy time of one step.
    """

    busy: tuple[float, ...]
    busy_median: tuple[float, ...]
    busy_spread: tuple[float, ...]
    input: tuple[float, ...]
    wait: tuple[float, ...]
    steps: tuple[float, ...]
    compilations: tuple[float, ...]
    compile_seconds: tuple[float, ...]
    # A checksum of the parameters: whole numbers below 2**32, exact in a float64.
    digest: tuple[float, ...]

    @classmethod
    def from_columns(cls, table: Float64[np.ndarray, "w k"]) -> "RoundTable":
        """From the rows that `rows` made, of all workers."""
        return cls(*(tuple(column) for column in table.T.tolist()))

    def observation(self, round: int, allocation: Allocation) -> Observation:
        """What a policy sees of it."""
        return Observation(
            round=round,
            sizes=allocation.sizes,
            capacities=allocation.capacities,
            busy_seconds=self.busy,
            busy_median_seconds=self.busy_median,
            busy_spread_seconds=self.busy_spread,
            input_seconds=self.input,
            wait_seconds=self.wait,
            measured_steps=whole(self.steps),
            compilations=whole(self.compilations),
            compile_seconds=self.compile_seconds,
        )


def rows(
    workers: Sequence[int],
    times: Sequence[WorkerTimes],
    compilations: Sequence[Compilation],
    digests: Sequence[int],
) -> Float64[np.ndarray, "l k"]:
    """The rows of the local workers, in the columns of `RoundTable`."""
    table = []
    for worker, seen, digest in zip(workers, times, digests, strict=True):
        mine = [c for c in compilations if c.workers[0] == worker]
        table.append(
            (
                sum(seen.busy),
                float(np.median(seen.busy)) if seen.busy else 0.0,
                spread_seconds(seen.busy),
                sum(seen.input),
                sum(seen.wait),
                len(seen.busy),
                len(mine),
                sum(c.seconds for c in mine),
                digest,
            )
        )
    return np.array(table, np.float64)


def whole(values: Sequence[float]) -> tuple[int, ...]:
    """Counts that travelled as floats."""
    return tuple(int(value) for value in values)

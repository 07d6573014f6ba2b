"""Steps in flight: rows in, outcomes out, dispatched a few steps ahead of what is read.

Brings the rows of this process's workers, runs the three programs and has the meter
watch them. Knows no policy and decides nothing: the allocation comes from outside, and
what came of each step goes back. Used by `trainer` alone.
"""

import collections
import time
from collections.abc import Callable, Generator, Iterator

import numpy as np

from jdlb.balance.allocation import Allocation
from jdlb.data.loader import (
    LocalBatch,
    RoundLoader,
    Source,
    Standard,
    Transform,
    stack,
)
from jdlb.engine.meter import Meter
from jdlb.engine.step import Compilation, StepEngine, StepHandles, StepOutcome


class Pipeline:
    """Dispatches the steps of one process under one allocation at a time."""

    def __init__(
        self,
        engine: StepEngine,
        meter: Meter,
        source: Source,
        transform: Transform,
        standard: Standard,
        *,
        global_batch: int,
        seed: int,
        run_ahead: int,
        prefetch: int,
        on_step: Callable[[int, int], None] | None,
    ):
        """See `Trainer` for the arguments; `prepare` must come before the first step."""
        self._engine = engine
        self._meter = meter
        self._source = source
        self._transform = transform
        self._standard = standard
        self._global_batch = global_batch
        self._seed = seed
        self._run_ahead = run_ahead
        self._prefetch = prefetch
        self._on_step = on_step
        self._allocation = Allocation((), ())
        # Workers whose next step is the first of a new shape.
        self._fresh: frozenset[int] = frozenset()

    def prepare(self, allocation: Allocation) -> list[Compilation]:
        """Compile what the allocation lacks; its first step is not measured.

        Only on a drained pipeline.
        """
        self._allocation = allocation
        made = self._engine.prepare(allocation.capacities)
        # Prepared twice in a row, what was new the first time has not run yet.
        self._fresh |= {w for c in made for w in c.workers}
        return made

    def outcomes(
        self, order: np.ndarray, epoch: int, steps: range
    ) -> Generator[StepOutcome, None, None]:
        """What came of each of these steps of an epoch.

        Close it where it is left early; that drops what is in flight, so leave it only
        where the replicas are halted or the run ends.

        Args:
          order: int64 [N], the rows of the epoch in order of use.
          epoch: what transforms and the loss function's keys depend on.
          steps: which steps of the epoch.
        """
        pending: collections.deque[StepHandles] = collections.deque()
        with RoundLoader(
            self._source,
            self._transform,
            order,
            steps,
            self._allocation,
            self._engine.workers.local,
            self._global_batch,
            self._seed,
            epoch,
            self._prefetch,
            self._standard,
        ) as loader:
            for batch, waited in _timed(loader):
                pending.append(self._dispatch(batch, epoch, waited))
                if len(pending) > self._run_ahead:
                    yield self._engine.outcome(pending.popleft())
        while pending:
            yield self._engine.outcome(pending.popleft())

    def _dispatch(self, batch: LocalBatch, epoch: int, waited: float) -> StepHandles:
        """Start one step, whose input took the loop `waited` seconds."""
        if self._on_step is not None:
            self._on_step(epoch, batch.step)
        inputs = self._engine.place(batch.workers, self._seed, epoch)
        handles = self._engine.step(inputs)
        full = sum(batch.sizes) == self._global_batch
        self._meter.watch(
            handles.contributed,
            handles.reduced,
            waited,
            [full and w not in self._fresh for w in self._engine.workers.local],
        )
        self._fresh = frozenset()
        return handles


def transformed_example(
    source: Source, transform: Transform, standard: Standard, seed: int
) -> dict[str, np.ndarray]:
    """The first example as the model sees it in epoch 0, without a leading axis."""
    index = np.zeros(1, np.int64)
    ready = transform(stack([source[0]], index, standard), index, seed, 0)
    return {name: field[0] for name, field in ready.items()}


def _timed(loader: RoundLoader) -> Iterator[tuple[LocalBatch, float]]:
    """The batches, each with the seconds that the loop waited for it."""
    while True:
        asked = time.perf_counter()
        batch = next(loader, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - asked

"""Joins the rooms: what ten lines of a user's loop call.

A `Trainer` brings the rows of this process's workers, runs the three programs, watches
them, and at the end of each round lets the controller decide. It reads no configuration
and writes no file: typed arguments in, records out. Every process of a job makes the
same calls in the same order.
"""

import collections
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from jdlb import agreement
from jdlb.balance import policies
from jdlb.balance.allocation import Allocation, Limits, padded, round_shares
from jdlb.balance.controller import Controller
from jdlb.balance.policies.protocol import AnyPolicy, Cluster
from jdlb.cluster import hosts
from jdlb.data.loader import (
    LocalBatch,
    RoundLoader,
    Source,
    Transform,
    identity,
    read_standard,
    stack,
)
from jdlb.data.partition import epoch_order, steps_in_epoch
from jdlb.data.whole import worker_batches
from jdlb.engine.evaluation import Evaluation
from jdlb.engine.exchange import Digest, Exchange
from jdlb.engine.mesh import Workers, order_workers
from jdlb.engine.meter import Meter, WorkerTimes
from jdlb.engine.programs import LossFunction
from jdlb.engine.step import Compilation, StepEngine, StepHandles, StepOutcome
from jdlb.errors import RunError, UserError
from jdlb.records import RoundRecord
from jdlb.tally import RoundTable, Tally, rows, whole

PROBE_STEPS = 10
"""Steps of a probe; the first, of a new shape, is left out."""

MAX_SKIPS_IN_A_ROW = 10
"""So many skipped updates in a row end the run."""


class Trainer:
    """Trains one model on all workers of the job under one policy."""

    def __init__(
        self,
        *,
        loss: LossFunction,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        source: Source,
        global_batch: int,
        policy: str | AnyPolicy = "dlb",
        seed: int = 0,
        transform: Transform = identity,
        cluster: Cluster | None = None,
        aligned: bool = True,
        dead_band: float = 0.0,
        dry_run: bool = False,
        round_steps: int | None = None,
        workers: Workers | None = None,
        run_ahead: int = 2,
        prefetch: int = 2,
        on_step: Callable[[int, int], None] | None = None,
    ):
        """Place the model and compile what the first allocation needs.

        Args:
          loss: (parameters, batch) -> (losses [c], {name: [c]}), per example. The
            batch holds the fields of the source, "index", and in "key" a random key
            for each example, a function of (seed, epoch, index).
          params: flax parameters, the same on every process.
          optimizer: any optax transformation. It sees the mean gradient of the
            global batch: clipping, decay and schedules act as on one device.
          source: random access to dict examples; TFDS data sources fit.
          global_batch: examples an optimizer step, B, whatever the workers.
          policy: a name of `jdlb.balance.policies`, or a policy.
          seed: of the order of the examples, of augmentation and of dropout.
          transform: vectorised, on the host: see `jdlb.data.loader.Transform`.
          cluster: ladder and limits; by default those of `Cluster.create`.
          aligned: keep sizes on ladder edges, so that little is padded.
          dead_band: no move below this fraction of every worker's size.
          dry_run: decide and record, but keep the first allocation.
          round_steps: steps between two decisions; None for an epoch.
          workers: by default all devices of the job.
          run_ahead: steps dispatched before the oldest is waited for.
          prefetch: batches read ahead.
          on_step: called with (epoch, step) before each step is dispatched.

        Raises:
          UserError: the arguments do not fit each other.
        """
        if not 0 <= seed < 2**32:
            raise UserError(f"seed {seed}: use a whole number from 0 to 2**32 - 1")
        if run_ahead < 1 or (round_steps is not None and round_steps < 1):
            raise UserError(
                f"run_ahead is {run_ahead}, round_steps {round_steps}: use at least 1"
            )
        if not len(source):
            raise UserError("the data source is empty: prepare it, or name another")
        self.workers = workers or default_workers()
        self._cluster = cluster or Cluster.create(self.workers.count, global_batch)
        self._controller = Controller(
            policies.get(policy) if isinstance(policy, str) else policy,
            self._cluster,
            aligned,
            dead_band,
            dry_run,
        )
        if self._cluster.global_batch != global_batch:
            raise UserError(
                f"the cluster is for a global batch of {self._cluster.global_batch}, "
                f"not {global_batch}"
            )
        self._source = source
        self._transform = transform
        self._standard = read_standard(source, 0)
        self._seed = seed
        self._round_steps = round_steps
        self._run_ahead = run_ahead
        self._prefetch = prefetch
        self._on_step = on_step
        decision, self._control = self._controller.start()
        self.allocation: Allocation = decision.allocation
        self._engine = StepEngine(
            self.workers, loss, optimizer, params, self._transformed_example()
        )
        self._loss = loss
        self._exchange = Exchange(self.workers)
        self._digest = Digest(self.workers)
        self._evaluations: dict[LossFunction, Evaluation] = {}
        self._meter = Meter(self.workers.local)
        self._compilations: list[Compilation] = []
        self._prepare()
        self._probed = not self._controller.policy.probe
        self._skips_in_a_row = 0
        self._rounds = 0
        self.epoch = 0
        self.training_seconds = 0.0
        agreement.check_start(
            self._exchange,
            self.workers,
            {
                "global program": zlib.crc32(self._engine.global_program.encode()),
                "number of examples": len(source),
                "global batch": global_batch,
                "seed": seed,
            },
            self._digest.of(self._engine.state.params),
        )

    @property
    def params(self) -> PyTree:
        """The parameters as host arrays: plain flax parameters."""
        return self._engine.replica(self.workers.local[0])

    @property
    def steps_in_epoch(self) -> int:
        """Optimizer steps an epoch, the last partial one included."""
        return steps_in_epoch(len(self._source), self._cluster.global_batch)

    def train_epoch(self) -> tuple[RoundRecord, ...]:
        """Train one epoch; one record a round (one a epoch unless configured).

        Raises:
          UserError: an example is not like the others.
          RunError: too many skipped updates in a row, replicas that disagree, or a
            share that fits into no worker's memory.
        """
        return tuple(self.rounds())

    def rounds(self) -> Iterator[RoundRecord]:
        """As `train_epoch`, a round at a time."""
        order = epoch_order(self._seed, self.epoch, len(self._source))
        if not self._probed:
            self.probe()
        total = self.steps_in_epoch
        length = self._round_steps or total
        for first in range(0, total, length):
            yield self._round(order, range(first, min(first + length, total)))
        self.epoch += 1

    def probe(self) -> None:
        """Measure all workers at once under the first allocation, then decide.

        Steps of real batches whose update is left out: the meter sees what it sees in
        training, which is input, update, forward and backward.
        """
        start = time.perf_counter()
        times = self.measure(PROBE_STEPS)
        self._decide(self._gather(times), self._rounds)
        self._probed = True
        self.training_seconds += time.perf_counter() - start

    def measure(self, steps: int) -> tuple[WorkerTimes, ...]:
        """Run whole steps that change nothing; the times of each local worker."""
        order = epoch_order(self._seed, self.epoch, len(self._source))
        full = len(self._source) // self._cluster.global_batch
        self._engine.set_halted(True)
        self._meter.begin_round()
        for first in range(0, steps if full else 0, max(full, 1)):
            for _ in self._outcomes(order, range(min(full, steps - first))):
                pass
        times = self._meter.end_round()
        self._engine.set_halted(False)
        return times

    def evaluate(
        self,
        source: Source,
        transform: Transform | None = None,
        loss: LossFunction | None = None,
    ) -> tuple[int, dict[str, float]]:
        """Exact means over a whole source, on all workers.

        Args:
          source: any number of examples, at least one.
          transform: by default that of training.
          loss: by default that of training; give another where the model behaves
            differently (dropout).

        Returns:
          the number of examples, and the means of "loss" and every metric.
        """
        loss = loss or self._loss
        if loss not in self._evaluations:
            self._evaluations[loss] = Evaluation(self.workers, loss, self._exchange)
        count, workers = len(source), self.workers.count
        # In the proportions of training, whose floors and caps mean nothing here.
        shares = round_shares(
            self.allocation.sizes, count, Limits((0,) * workers, (count,) * workers)
        )
        ends = np.cumsum(shares)
        batches = worker_batches(
            source,
            transform or self._transform,
            [np.arange(ends[w] - shares[w], ends[w]) for w in self.workers.local],
            # One shape for good: an equal share of the batch fits every worker.
            -(-self._cluster.global_batch // workers),
        )
        return self._evaluations[loss](self._engine.state.params, batches)

    def close(self) -> None:
        """End the threads of the meter."""
        self._meter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _round(self, order: np.ndarray, steps: range) -> RoundRecord:
        start = time.perf_counter()
        self._prepare()
        tally = Tally(self._engine.layout.metric_names, self.workers.count)
        self._meter.begin_round()
        todo = steps
        while todo:
            done, failed = self._train(order, todo, tally)
            todo = todo[done:]
            if failed:
                self._back_off(failed)
        table = self._gather(self._meter.end_round())
        agreement.check_replicas(table.digest, f"after round {self._rounds}")
        ran = self.allocation
        reason = self._decide(table, self._rounds)
        seconds = time.perf_counter() - start
        self.training_seconds += seconds
        record = RoundRecord(
            policy=self._controller.policy.name,
            epoch=self.epoch,
            round=self._rounds,
            first_step=steps.start,
            steps=len(steps),
            examples=tally.examples,
            seconds=seconds,
            sizes=ran.sizes,
            capacities=ran.capacities,
            busy_seconds=table.busy,
            busy_median_seconds=table.busy_median,
            input_seconds=table.input,
            wait_seconds=table.wait,
            measured_steps=whole(table.steps),
            compilations=whole(table.compilations),
            compile_seconds=table.compile_seconds,
            metrics=tally.metrics,
            skipped_steps=tally.skipped,
            skipped_by_worker=tally.skipped_by_worker,
            next_sizes=self.allocation.sizes,
            rebalanced=self.allocation.sizes != ran.sizes,
            reason=reason,
        )
        self._rounds += 1
        return record

    def _train(
        self, order: np.ndarray, steps: range, tally: Tally
    ) -> tuple[int, tuple[int, ...]]:
        """Train these steps; how many are done, and who failed at the next one."""
        done = 0
        for outcome in self._outcomes(order, steps):
            if outcome.failed:
                return done, outcome.failed
            tally.add(outcome)
            self._skips_in_a_row = 0 if outcome.counted else self._skips_in_a_row + 1
            if self._skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
                bad = np.flatnonzero(tally.skipped_by_worker).tolist()
                named = agreement.name_workers(bad) if bad else "the whole batch"
                raise RunError(
                    f"{self._skips_in_a_row} updates in a row were skipped: gradients "
                    f"of {named} are NaN or infinite; lower the "
                    "learning rate or look at the data"
                )
            done += 1
        return done, ()

    def _outcomes(self, order: np.ndarray, steps: range) -> Iterator[StepOutcome]:
        """Dispatch these steps, a few ahead of what is yielded.

        Leaving early drops what is in flight: only where the replicas are halted.
        """
        pending: collections.deque[StepHandles] = collections.deque()
        with RoundLoader(
            self._source,
            self._transform,
            order,
            steps,
            self.allocation,
            self.workers.local,
            self._cluster.global_batch,
            self._seed,
            self.epoch,
            self._prefetch,
            self._standard,
        ) as loader:
            for batch, waited in _timed(loader):
                if self._on_step is not None:
                    self._on_step(self.epoch, batch.step)
                inputs = self._engine.place(batch.workers, self._seed, self.epoch)
                handles = self._engine.step(inputs)
                full = sum(batch.sizes) == self._cluster.global_batch
                self._meter.watch(
                    handles.contributed,
                    handles.reduced,
                    waited,
                    [full and w not in self._fresh for w in self.workers.local],
                )
                self._fresh = frozenset()
                pending.append(handles)
                if len(pending) > self._run_ahead:
                    yield self._engine.outcome(pending.popleft())
        while pending:
            yield self._engine.outcome(pending.popleft())

    def _prepare(self) -> None:
        """Compile what the allocation lacks; its first step is not measured."""
        made = self._engine.prepare(self.allocation.capacities)
        self._compilations += made
        self._fresh = frozenset(w for c in made for w in c.workers)

    def _gather(self, times: Sequence[WorkerTimes]) -> RoundTable:
        """What all workers saw, and did since the last time."""
        mine = rows(
            self.workers.local,
            times,
            self._compilations,
            self._digest.of(self._engine.state.params).tolist(),
        )
        self._compilations = []
        return RoundTable.from_columns(self._exchange.gather(mine))

    def _decide(self, table: RoundTable, round: int) -> str:
        """The lead decides, all adopt the same whole numbers; the reason."""
        if not self.workers.leads:
            self._adopt(self.allocation.sizes)
            return "decided by the lead"
        decision, self._control = self._controller.decide(
            table.observation(round, self.allocation), self._control
        )
        self._adopt(decision.allocation.sizes)
        return decision.reason

    def _adopt(self, sizes: Sequence[int]) -> None:
        """Take over the lead's sizes; what the other processes pass is not looked at."""
        agreed = self._exchange.from_lead(np.array(sizes, np.int32)).tolist()
        cluster = self._controller.cluster
        self.allocation = padded(agreed, cluster.ladder, cluster.limits)

    def _back_off(self, failed: Sequence[int]) -> None:
        """Lower the caps of workers that ran out of memory, and go on."""
        edges = self._cluster.ladder.edges
        caps = list(self._controller.cluster.limits.caps)
        for w in failed:
            lower = [e for e in edges if e < self.allocation.capacities[w]]
            caps[w] = lower[-1] if lower else 0
        try:
            self._controller = self._controller.with_caps(caps)
        except UserError as error:
            raise RunError(
                f"{agreement.name_workers(failed)} ran out of memory, and there is no room for "
                f"the examples elsewhere ({error})"
            ) from error
        sizes = self.allocation.sizes
        if self.workers.leads:
            decision, self._control = self._controller.reallocate(self._control)
            sizes = decision.allocation.sizes
        self._adopt(sizes)
        self._meter.end_round()
        self._prepare()
        self._engine.set_halted(False)
        self._meter.begin_round()

    def _transformed_example(self) -> dict[str, np.ndarray]:
        """The first example as the model sees it, without a leading axis."""
        index = np.zeros(1, np.int64)
        fields = stack([self._source[0]], index, self._standard)
        ready = self._transform(fields, index, self._seed, 0)
        return {name: field[0] for name, field in ready.items()}


def default_workers() -> Workers:
    """All devices of the job."""
    return order_workers(jax.devices(), hosts.current().process_index)


def _timed(loader: RoundLoader) -> Iterator[tuple[LocalBatch, float]]:
    """The batches, each with the seconds that the loop waited for it."""
    while True:
        asked = time.perf_counter()
        batch = next(loader, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - asked

"""Joins the rooms: what ten lines of a user's loop call.

A `Trainer` brings the rows of this process's workers, runs the three programs, watches
them, and at the end of each round lets the controller decide. It reads no configuration
and writes no file: typed arguments in, records out. Every process of a job makes the
same calls in the same order.
"""

import contextlib
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Self

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from jdlb import agreement
from jdlb.balance.allocation import Allocation
from jdlb.balance.policies.protocol import AnyPolicy, Cluster
from jdlb.cluster import hosts
from jdlb.data.loader import Source, Transform, identity, read_standard
from jdlb.data.partition import epoch_order, steps_in_epoch
from jdlb.data.whole import worker_batches, worker_spans
from jdlb.engine.evaluation import Evaluation
from jdlb.engine.exchange import Digest, Exchange
from jdlb.engine.mesh import Workers, order_workers
from jdlb.engine.meter import Meter, WorkerTimes
from jdlb.engine.programs import LossFunction
from jdlb.engine.step import Compilation, StepEngine, StepOutcome
from jdlb.errors import RunError, UserError
from jdlb.pipeline import Pipeline, transformed_example
from jdlb.records import RoundRecord
from jdlb.steering import Steering, controller_of
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
        epochs: int | None = None,
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
          epochs: how many are planned. With it, shares move only where that saves more
            time in the rest of the run than new programs take to compile.
          workers: by default all devices of the job.
          run_ahead: steps dispatched before the oldest is waited for.
          prefetch: batches read ahead.
          on_step: called with (epoch, step) before each step is dispatched.

        Raises:
          UserError: the arguments do not fit each other.
        """
        if not 0 <= seed < 2**32:
            raise UserError(f"seed {seed}: use a whole number from 0 to 2**32 - 1")
        counts = {"round_steps": round_steps, "run_ahead": run_ahead}
        for name, count in {**counts, "prefetch": prefetch}.items():
            if count is not None and count < 1:
                raise UserError(f"{name} is {count}: use at least 1")
        if not len(source):
            raise UserError("the data source is empty: prepare it, or name another")
        self.workers = workers or default_workers()
        self._cluster = cluster or Cluster.create(self.workers.count, global_batch)
        controller = controller_of(
            policy,
            self._cluster,
            self.workers.count,
            global_batch,
            aligned=aligned,
            dead_band=dead_band,
            dry_run=dry_run,
        )
        self._source = source
        self._transform = transform
        standard = read_standard(source, 0)
        self._seed = seed
        self._round_steps = round_steps
        self._epochs = epochs
        self._exchange = Exchange(self.workers)
        self._steering = Steering(controller, self._exchange, self.workers.leads)
        example = transformed_example(source, transform, standard, seed)
        self._engine = StepEngine(self.workers, loss, optimizer, params, example)
        self._loss = loss
        self._digest = Digest(self.workers)
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
        self._evaluations: dict[LossFunction, Evaluation] = {}
        self._meter = Meter(self.workers.local)
        self._pipeline = Pipeline(
            self._engine,
            self._meter,
            source,
            transform,
            standard,
            global_batch=global_batch,
            seed=seed,
            run_ahead=run_ahead,
            prefetch=prefetch,
            on_step=on_step,
        )
        self._compilations: list[Compilation] = []
        self._prepare()
        self._probed = not controller.policy.probe
        self._skips_in_a_row = 0
        self._rounds = 0
        self.epoch = 0
        self.training_seconds = 0.0

    @property
    def allocation(self) -> Allocation:
        """Sizes and capacities from the next step on."""
        return self._steering.allocation

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
        table = self._gather(times)
        self._steering.decide(
            table.observation(self._rounds, self.allocation), self._steps_left(0)
        )
        self._probed = True
        self.training_seconds += time.perf_counter() - start

    def measure(self, steps: int) -> tuple[WorkerTimes, ...]:
        """Run whole steps that change nothing; the times of each local worker.

        None are run where the source has not one full global batch.
        """
        full = len(self._source) // self._cluster.global_batch
        firsts = range(0, steps, full) if full else ()
        passes = [range(min(full, steps - first)) for first in firsts]
        while True:
            self._engine.set_halted(True)
            self._meter.begin_round()
            failed = self._rehearse(passes)
            times = self._meter.end_round()
            self._engine.set_halted(False)
            if not failed:
                return times
            self._back_off(failed)

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

        Raises:
          UserError: the source is empty, or an example is not like the others.
        """
        if not len(source):
            raise UserError("nothing to evaluate: the source is empty; name another")
        loss = loss or self._loss
        if loss not in self._evaluations:
            self._evaluations[loss] = Evaluation(self.workers, loss, self._exchange)
        # In the proportions of training, whose floors and caps mean nothing here.
        spans = worker_spans(self.allocation.sizes, len(source))
        batches = worker_batches(
            source,
            transform or self._transform,
            [spans[w] for w in self.workers.local],
            # One shape for good: an equal share of the batch fits every worker.
            -(-self._cluster.global_batch // self.workers.count),
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
                self._meter.end_round()
                self._back_off(failed)
                self._engine.set_halted(False)
                self._meter.begin_round()
        table = self._gather(self._meter.end_round())
        agreement.check_replicas(table.digest, f"after round {self._rounds}")
        ran = self.allocation
        reason = self._steering.decide(
            table.observation(self._rounds, ran), self._steps_left(steps.stop)
        )
        seconds = time.perf_counter() - start
        self.training_seconds += seconds
        record = RoundRecord(
            policy=self._steering.policy,
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

    def _steps_left(self, done: int) -> int | None:
        """Steps of the run after `done` of this epoch; None if nobody said."""
        if self._epochs is None:
            return None
        return max(self._epochs - self.epoch, 0) * self.steps_in_epoch - done

    def _train(
        self, order: np.ndarray, steps: range, tally: Tally
    ) -> tuple[int, tuple[int, ...]]:
        """Train these steps; how many are done, and who failed at the next one."""
        done = 0
        with self._outcomes(order, steps) as outcomes:
            for outcome in outcomes:
                if outcome.failed:
                    return done, outcome.failed
                tally.add(outcome)
                self._end_if_stuck(outcome.counted, tally)
                done += 1
        return done, ()

    def _rehearse(self, passes: Sequence[range]) -> tuple[int, ...]:
        """Run these steps, each range on its own; who failed."""
        order = epoch_order(self._seed, self.epoch, len(self._source))
        for steps in passes:
            with self._outcomes(order, steps) as outcomes:
                failed = next((o.failed for o in outcomes if o.failed), ())
            if failed:
                return failed
        return ()

    def _outcomes(
        self, order: np.ndarray, steps: range
    ) -> contextlib.closing[Generator[StepOutcome, None, None]]:
        return contextlib.closing(self._pipeline.outcomes(order, self.epoch, steps))

    def _end_if_stuck(self, counted: bool, tally: Tally) -> None:
        """Count skipped updates in a row, and end a run that has too many."""
        self._skips_in_a_row = 0 if counted else self._skips_in_a_row + 1
        if self._skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
            bad = np.flatnonzero(tally.skipped_by_worker).tolist()
            named = agreement.name_workers(bad) if bad else "the whole batch"
            raise RunError(
                f"{self._skips_in_a_row} updates in a row were skipped: gradients of "
                f"{named} are NaN or infinite; lower the learning rate or look at the "
                "data"
            )

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

    def _back_off(self, failed: Sequence[int]) -> None:
        """Smaller shares for workers that ran out of memory; on a drained pipeline."""
        self._steering.back_off(failed)
        self._prepare()

    def _prepare(self) -> None:
        self._compilations += self._pipeline.prepare(self.allocation)


def default_workers() -> Workers:
    """All devices of the job."""
    return order_workers(jax.devices(), hosts.current().process_index)

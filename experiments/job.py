"""What the processes of a comparison do: every policy in turn, in one job.

Each process runs `run` with the same job. One job for all policies: processes start
once, and the solo rates are measured between the runs, on the same machine in the same
minutes. CPU budgets are lifted while programs compile.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TextIO

import jax
import numpy as np

from experiments.config import Config, from_json, to_json
from experiments.train import (
    Task,
    header,
    make_task,
    make_trainer,
    open_records,
    save_params,
    train,
)
from jdlb import records
from jdlb.cluster import hosts
from jdlb.cluster.launch.channel import WorkerChannel
from jdlb.engine.exchange import Exchange
from jdlb.engine.mesh import Workers, order_workers
from jdlb.records import EvaluationRecord, Record, RoundRecord, SoloRecord
from jdlb.report.summary import SOLO_FOLDER
from jdlb.report.tables import round_line
from jdlb.trainer import Trainer, default_workers

JOB_FILE = "job.json"

SOLO_STEPS = 8
"""Steps of a solo measurement; the first, of a new shape, is left out."""


@dataclass(frozen=True)
class Job:
    """A comparison, as its processes read it."""

    name: str
    config: Config
    policies: tuple[str, ...]
    speeds: tuple[float, ...]
    out: Path

    def write(self) -> Path:
        """Write the job into its folder."""
        path = self.out / JOB_FILE
        fields = {**asdict(self), "config": to_json(self.config), "out": str(self.out)}
        path.write_text(json.dumps(fields, indent=1), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """The job in a file that `write` made."""
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            fields["name"],
            from_json(fields["config"]),
            tuple(fields["policies"]),
            tuple(fields["speeds"]),
            Path(fields["out"]),
        )


class Launcher:
    """This process's line to what launched it: budgets and progress."""

    def __init__(self, exchange: Exchange, workers: Workers):
        self._channel = WorkerChannel.from_environ(os.environ)
        self._exchange = exchange
        self._workers = workers

    def limit(self, on: bool) -> None:
        """Put the CPU budgets of all workers in force, or lift them."""
        if self._channel is not None:
            self._channel.request({"event": "throttle", "on": on})
        self.wait()

    def wait(self) -> None:
        """Return when every process has come here."""
        self._exchange.total(np.zeros((len(self._workers.local), 1), np.int32))

    def tell(self, event: str, **fields: Any) -> None:
        """Progress, from the lead alone."""
        if self._channel is not None and self._workers.leads:
            self._channel.send({"event": event, **fields})

    @contextlib.contextmanager
    def budgets(self) -> Iterator[None]:
        """Budgets in force for the length of a block."""
        self.limit(True)
        yield
        self.limit(False)


def run(job: Job) -> None:
    """Solo rates, every policy, solo rates again; records into the job's folder."""
    with hosts.joined(hosts.parse(os.environ)):
        workers = default_workers()
        exchange = Exchange(workers)
        launcher = Launcher(exchange, workers)
        task = make_task(job.config)
        balanced = _balanced_sizes(job, task, launcher)
        with _records(job.out / SOLO_FOLDER, workers) as solo:
            _write(solo, _measure_solo(job, task, balanced, launcher, exchange))
            for policy in job.policies:
                _run_policy(job, task, policy, launcher)
            _write(solo, _measure_solo(job, task, balanced, launcher, exchange))


def _run_policy(job: Job, task: Task, policy: str, launcher: Launcher) -> None:
    launcher.tell("compiling", policy=policy)
    with make_trainer(job.config, task, policy) as trainer:
        trainer.evaluate(task.splits.test)
        folder = job.out / policy
        with _records(folder, trainer.workers) as file, launcher.budgets():
            _write(file, header(job.config, trainer, policy, job.speeds))
            for record in train(job.config, task, trainer):
                _write(file, record)
                if isinstance(record, RoundRecord):
                    launcher.tell("line", text=round_line(record))
                if isinstance(record, EvaluationRecord):
                    launcher.tell("epoch", policy=policy, epoch=record.epoch)
        if trainer.workers.leads:
            save_params(folder, trainer.params)


def _balanced_sizes(job: Job, task: Task, launcher: Launcher) -> tuple[int, ...]:
    """The sizes that one probe of all workers at once asks for."""
    launcher.tell("probe", text="compiling and probing all workers at once")
    with make_trainer(job.config, task, "static") as trainer, launcher.budgets():
        trainer.probe()
    return trainer.allocation.sizes


def _measure_solo(
    job: Job,
    task: Task,
    sizes: tuple[int, ...],
    launcher: Launcher,
    exchange: Exchange,
) -> SoloRecord:
    """Each worker alone with its balanced share, the others waiting."""
    launcher.tell("probe", text="measuring each worker alone")
    everybody = default_workers()
    trainers = {
        w: _solo_trainer(job, task, everybody, w, sizes) for w in everybody.local
    }
    seconds = np.zeros((len(everybody.local), 1))
    with launcher.budgets():
        for w in range(everybody.count):
            if w in trainers:
                (times,) = trainers[w].measure(SOLO_STEPS)
                seconds[everybody.local.index(w)] = np.median(times.busy)
            launcher.wait()
    for trainer in trainers.values():
        trainer.close()
    table = exchange.gather(seconds)
    return SoloRecord(sizes, tuple(table[:, 0].tolist()))


def _solo_trainer(
    job: Job, task: Task, everybody: Workers, worker: int, sizes: tuple[int, ...]
) -> Trainer:
    """A job of one worker, whose global batch is its share."""
    device = everybody.devices[worker]
    assert isinstance(device, jax.Device)
    alone = order_workers([device], device.process_index)
    size = sizes[worker]
    config = dataclasses.replace(job.config, global_batch=size, caps=(), granule=size)
    return make_trainer(config, task, "equal", alone)


@contextlib.contextmanager
def _records(folder: Path, workers: Workers) -> Iterator[TextIO | None]:
    """The records file on the lead, None elsewhere."""
    if not workers.leads:
        yield None
        return
    with open_records(folder) as file:
        yield file


def _write(file: TextIO | None, record: Record) -> None:
    if file is not None:
        records.write(file, record)

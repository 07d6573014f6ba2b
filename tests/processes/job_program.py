"""What the tests of this folder start in every process of a job.

    python job_program.py '{"devices": [2, 1], "scenarios": ["dlb"], ...}'

Runs scenarios one after the other in one job, as a start costs seconds, and sends what
came of each to the launcher. Decides nothing: the tests do.
"""

import dataclasses
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import tiny_model
from tiny_model import EXAMPLES, GLOBAL_BATCH, SEED

from jdlb import records
from jdlb.balance import policies
from jdlb.balance.policies.protocol import Cluster, Observation, Policy, equal_targets
from jdlb.cluster import hosts
from jdlb.cluster.hosts import Host
from jdlb.cluster.launch.channel import WorkerChannel
from jdlb.data.partition import epoch_order, step_rows
from jdlb.errors import RunError, UserError
from jdlb.trainer import Trainer

DELAY_SECONDS = 0.2
# Of one example, on a slow process and on the others.
UNLIKE_SECONDS = (0.05, 0.0005)
NAN_STEP = (0, 2)
EVALUATED = (37, 2)


@dataclasses.dataclass(frozen=True)
class Job:
    """What a scenario knows about where it runs."""

    host: Host
    channel: WorkerChannel
    options: dict[str, Any]

    @property
    def is_odd(self) -> bool:
        """Whether this is the process that is made to differ, where one is."""
        return self.host.process_index == self.options["odd"]


class CountingSource(Sequence):
    """The examples, and how often each was read."""

    def __init__(self, count: int = EXAMPLES):
        self._examples = tiny_model.make_examples(count)
        self._reads = np.zeros(count, int)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index):
        self._reads[index] += 1
        return self._examples[index]

    def take(self) -> list[int]:
        """Reads of each example since the last time."""
        reads, self._reads = self._reads, np.zeros_like(self._reads)
        return reads.tolist()


def shifting() -> Policy[int]:
    """Other shares every round, whatever the times."""

    def init(cluster: Cluster) -> tuple[np.ndarray, int]:
        return equal_targets(cluster), 0

    def update(observation: Observation, turn: int) -> tuple[np.ndarray, int]:
        weights = np.roll(np.arange(1.0, len(observation.sizes) + 1), turn)
        return sum(observation.sizes) * weights / weights.sum(), turn + 1

    return Policy("shifting", init, update)


def make_trainer(granule: int = 4, **changes: Any) -> Trainer:
    cluster = Cluster.create(
        jax.device_count(),
        GLOBAL_BATCH,
        granule=granule,
        # Few programs to compile, and much padding.
        growth=1.0,
    )
    return Trainer(
        **{
            "loss": tiny_model.loss,
            "params": tiny_model.make_params(),
            "optimizer": tiny_model.make_optimizer(),
            "source": tiny_model.make_examples(),
            "global_batch": GLOBAL_BATCH,
            "policy": policies.get("equal"),
            "seed": SEED,
            "cluster": cluster,
        }
        | changes
    )


def run(trainer: Trainer, epochs: int) -> dict[str, Any]:
    """Train; the records, and every local replica's parameters at the end."""
    lines = []
    for _ in range(epochs):
        lines += [records.to_line(record) for record in trainer.train_epoch()]
    replicas = [
        tiny_model.flatten(trainer._engine.replica(w)).tolist()
        for w in trainer.workers.local
    ]
    return {"records": lines, "replicas": replicas, "local": trainer.workers.local}


def trained(epochs: int, **changes: Any) -> dict[str, Any]:
    """As `run`, with what was read each epoch, and evaluations after the last."""
    source = CountingSource()
    with make_trainer(source=source, **changes) as trainer:
        # The first example was read to learn its shape.
        source.take()
        parts = []
        reads = []
        for _ in range(epochs):
            parts.append(run(trainer, 1))
            reads.append(source.take())
        evaluations = [
            trainer.evaluate(tiny_model.make_examples(count)) for count in EVALUATED
        ]
    lines = [line for part in parts for line in part["records"]]
    return {
        **parts[-1],
        "records": lines,
        "reads": reads,
        "evaluations": evaluations,
    }


def dlb(job: Job) -> dict[str, Any]:
    return trained(3, policy="dlb")


def shifted(job: Job) -> dict[str, Any]:
    """Two steps a round: shares change inside an epoch, too."""
    return trained(2, policy=shifting(), aligned=False, round_steps=2)


def delayed(job: Job) -> dict[str, Any]:
    def on_step(epoch: int, step: int) -> None:
        if job.is_odd:
            time.sleep(DELAY_SECONDS)

    with make_trainer(on_step=on_step) as trainer:
        return run(trainer, 1)


def unlike(job: Job) -> dict[str, Any]:
    """Time in proportion to the own share, 100 times as much on one process."""
    seconds = UNLIKE_SECONDS[0 if job.is_odd else 1]

    def on_step(epoch: int, step: int) -> None:
        time.sleep(seconds * sum(trainer.allocation.sizes[w] for w in local))

    with make_trainer(granule=1, policy="dlb", on_step=on_step) as trainer:
        local = trainer.workers.local
        return run(trainer, 4)


def nan_once(job: Job) -> dict[str, Any]:
    """One step of one process has NaN in all its rows."""
    epoch, step = NAN_STEP
    order = epoch_order(SEED, epoch, EXAMPLES)
    return nan_in(job, {(epoch, row) for row in step_rows(order, step, GLOBAL_BATCH)})


def nan_always(job: Job) -> dict[str, Any]:
    return nan_in(job, {(e, row) for e in range(5) for row in range(EXAMPLES)})


def nan_in(job: Job, bad: set[tuple[int, int]]) -> dict[str, Any]:
    def transform(
        fields: dict[str, np.ndarray], index: np.ndarray, seed: int, epoch: int
    ) -> dict[str, np.ndarray]:
        rows = [(epoch, row) in bad for row in index.tolist()]
        x = fields["x"].copy()
        if job.is_odd:
            x[rows] = np.nan
        return {**fields, "x": x}

    with make_trainer(transform=transform, policy="dlb") as trainer:
        try:
            return run(trainer, 3)
        except RunError as error:
            return {"error": str(error)}


# What may differ by mistake between the processes of a job.
DISAGREEMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "params": lambda: {
        "params": jax.tree.map(lambda x: x + np.float32(1e-6), tiny_model.make_params())
    },
    "seed": lambda: {"seed": SEED + 1},
    "length": lambda: {"source": tiny_model.make_examples(EXAMPLES - 1)},
    "model": lambda: {"params": tiny_model.make_params(hidden=17)},
}


def disagree(job: Job) -> dict[str, Any]:
    """The error of every disagreement, in turn; the job goes on after each."""
    errors = {}
    for name, change in DISAGREEMENTS.items():
        try:
            make_trainer(**(change() if job.is_odd else {})).close()
            errors[name] = "no error"
        except (UserError, RunError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def wrong(what: str) -> Callable[[Job], dict[str, Any]]:
    """One disagreement that nobody catches."""

    def scenario(job: Job) -> dict[str, Any]:
        make_trainer(**(DISAGREEMENTS[what]() if job.is_odd else {})).close()
        return {}

    return scenario


def killed(job: Job) -> dict[str, Any]:
    """One process dies in the middle of its second epoch."""

    def on_step(epoch: int, step: int) -> None:
        if job.is_odd and (epoch, step) == (1, 2):
            job.channel.request({"event": "dying"})
            os.kill(os.getpid(), signal.SIGKILL)

    with make_trainer(on_step=on_step) as trainer:
        return run(trainer, 3)


SCENARIOS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "dlb": dlb,
    "shifted": shifted,
    "delayed": delayed,
    "unlike": unlike,
    "nan once": nan_once,
    "nan always": nan_always,
    "disagree": disagree,
    "wrong length": wrong("length"),
    "wrong params": wrong("params"),
    "killed": killed,
}


def main() -> None:
    options = json.loads(sys.argv[1])
    facts = hosts.parse(os.environ)
    warnings.simplefilter("error")
    # Compilation is most of what these tests take.
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_num_cpu_devices", options["devices"][facts.process_index])
    channel = WorkerChannel.from_environ(os.environ)
    assert channel is not None
    channel.send({"event": "pid", "pid": os.getpid()})
    with hosts.joined(facts) as host:
        job = Job(host, channel, options)
        for name in options["scenarios"]:
            start = time.monotonic()
            result = SCENARIOS[name](job)
            seconds = time.monotonic() - start
            channel.send(
                {"event": "result", "name": name, "result": result, "took": seconds}
            )
        if host.process_index == options["late"]:
            time.sleep(options["late_seconds"])
        channel.request({"event": "finished"})
    channel.send({"event": "left"})


if __name__ == "__main__":
    main()

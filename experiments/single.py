"""`train`: one run, alone or as one process of a job that something else started."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import jax
from rich.console import Console

from experiments.compare import new_folder
from experiments.config import Config, check
from experiments.train import (
    header,
    make_policy,
    make_task,
    make_trainer,
    open_records,
    save_params,
    train,
)
from jdlb import records
from jdlb.cluster import hosts
from jdlb.data import builders
from jdlb.errors import UserError
from jdlb.records import EvaluationRecord, Record, RoundRecord
from jdlb.report.tables import round_line

PROFILE_AFTER = 3
"""Steps before a profile begins: compilation is not what one looks for."""


@dataclass(frozen=True)
class TrainOptions:
    """What `train` takes beside the fields of the configuration."""

    out: Path | None = None
    """Folder for records and parameters; None for a new one under runs/."""
    profile: int = 0
    """Steps to profile, after the first few, into OUT/profile; 0 for none."""


class StepProfiler:
    """Traces some steps with JAX's profiler; an `on_step` of the trainer."""

    def __init__(self, folder: Path, steps: int):
        self._folder = folder
        self._steps = steps
        self._seen = 0

    def __call__(self, epoch: int, step: int) -> None:
        if self._steps and self._seen == PROFILE_AFTER:
            jax.profiler.start_trace(self._folder)
        if self._steps and self._seen == PROFILE_AFTER + self._steps:
            jax.profiler.stop_trace()
        self._seen += 1

    def close(self) -> None:
        """End a trace that the run was too short for."""
        if self._steps and PROFILE_AFTER < self._seen <= PROFILE_AFTER + self._steps:
            jax.profiler.stop_trace()


def train_alone(name: str, config: Config, options: TrainOptions) -> None:
    """Train and write records; the lead prints a line a round.

    Raises:
      UserError: bad input; nothing was written.
    """
    check(config)
    if options.profile < 0:
        raise UserError(f"--profile {options.profile}: use 0 or more steps")
    make_policy(config.policy, config)
    facts = hosts.parse(os.environ)
    console = Console(stderr=True)
    out = new_folder(options.out, name)
    if facts.process_count == 1 and not facts.scheduled:
        builders.prepare(config.dataset, config.data_folder)
    with hosts.joined(facts):
        task = make_task(config)
        profiler = StepProfiler(out / "profile", options.profile)
        with make_trainer(config, task, config.policy, on_step=profiler) as trainer:
            lead = trainer.workers.leads
            with contextlib.ExitStack() as stack:
                stack.callback(profiler.close)
                file = stack.enter_context(open_records(out)) if lead else None
                if file is not None:
                    records.write(file, header(config, trainer, config.policy))
                for record in train(config, task, trainer):
                    if file is not None:
                        records.write(file, record)
                        _tell(console, record)
            if lead:
                path = save_params(out, trainer.params)
                console.print(f"parameters in {path}", soft_wrap=True)


def _tell(console: Console, record: Record) -> None:
    if isinstance(record, RoundRecord):
        console.print(round_line(record), highlight=False, soft_wrap=True)
    if isinstance(record, EvaluationRecord):
        means = ", ".join(f"{name} {mean:.4f}" for name, mean in record.metrics.items())
        console.print(f"  test {means}", style="dim", highlight=False)

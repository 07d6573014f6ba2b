"""Starts `job_program.py` in joined processes, and collects what they sent."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jdlb import records
from jdlb.cluster.launch.local import run_local
from jdlb.records import RoundRecord

PROGRAM = Path(__file__).with_name("job_program.py")
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class Job:
    """What the processes of one job sent, and when (monotonic seconds)."""

    devices: tuple[int, ...]
    late: int | None
    events: list[tuple[float, int, dict[str, Any]]]

    @property
    def workers(self) -> int:
        return sum(self.devices)

    def of_kind(self, kind: str) -> list[tuple[float, int, dict[str, Any]]]:
        return [e for e in self.events if e[2]["event"] == kind]

    def results(self, name: str) -> list[dict[str, Any]]:
        """What came of a scenario, by process."""
        found = {
            p: event["result"]
            for _, p, event in self.of_kind("result")
            if event["name"] == name
        }
        return [found[p] for p in range(len(self.devices))]

    def rounds(self, name: str, process: int = 0) -> list[RoundRecord]:
        """The records that one process has of a scenario."""
        lines = self.results(name)[process]["records"]
        made = [records.from_line(line) for line in lines]
        assert all(isinstance(record, RoundRecord) for record in made)
        return [record for record in made if isinstance(record, RoundRecord)]

    def replicas(self, name: str) -> np.ndarray:
        """The parameters of all workers at the end, [W, p]."""
        by_worker = {
            w: replica
            for result in self.results(name)
            for w, replica in zip(result["local"], result["replicas"], strict=True)
        }
        return np.array([by_worker[w] for w in range(self.workers)])

    @property
    def pids(self) -> list[int]:
        return [event["pid"] for _, _, event in self.of_kind("pid")]

    @property
    def alive(self) -> list[int]:
        """Processes of the job that still run."""
        return [pid for pid in self.pids if Path(f"/proc/{pid}").exists()]


def run_job(job: Job, folder: Path, scenarios: Sequence[str], odd: int = 0) -> None:
    """Run scenarios in one job; `job` is filled even where this raises.

    Args:
      odd: the process that a scenario makes different.
    """

    def on_event(process: int, event: dict[str, Any]) -> None:
        job.events.append((time.monotonic(), process, event))

    options = {
        "devices": job.devices,
        "scenarios": scenarios,
        "odd": odd,
        "late": job.late,
        "late_seconds": 3.0,
    }
    run_local(
        [sys.executable, str(PROGRAM), json.dumps(options)],
        len(job.devices),
        environ={**os.environ, "PYTHONPATH": str(ROOT)},
        log_dir=folder / "logs",
        on_event=on_event,
    )


def new_job(devices: Sequence[int], late: int | None = None) -> Job:
    """A job of one process for each number of local devices; one may leave late."""
    return Job(tuple(devices), late, [])

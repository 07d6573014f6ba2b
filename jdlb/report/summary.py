"""Records to numbers: one summary a policy, and the object `compare --json` prints.

Pure functions but for `read_comparison`, which reads a folder. Must not know how the
numbers are shown.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jdlb import records
from jdlb.errors import UserError
from jdlb.records import EvaluationRecord, Record, RoundRecord, RunHeader, SoloRecord

Kind = TypeVar("Kind", RunHeader, RoundRecord, EvaluationRecord, SoloRecord)

SOLO_FOLDER = "solo"
# The policy that others are compared with: shown first where nobody states an order.
BASELINE = "equal"
# Epochs before this one pay for compilation and for finding the balance.
FIRST_COUNTED_EPOCH = 2


@dataclasses.dataclass(frozen=True)
class PolicySummary:
    """What one policy reached; None where the records do not tell.

    Rates and shares are of `counted_epochs`: the complete epochs from the third on;
    where there are none, those after the first; else all that there are. Busy and
    waiting seconds are of measured steps only.
    """

    policy: str
    counted_epochs: tuple[int, ...]
    # Median over the counted epochs.
    epoch_seconds: float
    # Examples of an epoch over `epoch_seconds`.
    examples_per_second: float
    fraction_of_ideal: float | None
    # Busy seconds over step seconds, all workers; a step is busy plus waiting.
    utilisation: float | None
    # Waiting seconds over step seconds: of all workers, and of each.
    wait_share: float | None
    wait_share_by_worker: tuple[float | None, ...]
    # Seconds a measured step, of each worker.
    busy_step_seconds: tuple[float | None, ...]
    wait_step_seconds: tuple[float | None, ...]
    # Median over epochs of (max - min) / mean of the workers' busy seconds a step.
    spread: float | None
    # Of the whole run.
    rebalances: int
    compilations: int
    # Of the last evaluation.
    test_accuracy: float | None
    # Examples a step of each worker in the last round.
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The records of one compare folder: of each policy, and of the workers alone."""

    runs: Mapping[str, tuple[Record, ...]]
    solos: tuple[SoloRecord, ...]

    @property
    def speeds(self) -> tuple[float, ...]:
        """CPU budget of each worker in cores; empty when nobody limited them."""
        for run in self.runs.values():
            for header in of_kind(run, RunHeader):
                return header.speeds
        return ()

    @property
    def ideal_examples_per_second(self) -> float | None:
        """See `ideal_examples_per_second`."""
        return ideal_examples_per_second(self.solos)

    @property
    def summaries(self) -> tuple[PolicySummary, ...]:
        """One summary a policy, in the order of `runs`."""
        ideal = self.ideal_examples_per_second
        return tuple(summarise(run, ideal) for run in self.runs.values())


def of_kind(run: Iterable[Record], kind: type[Kind]) -> tuple[Kind, ...]:
    """The records of one kind, in order."""
    return tuple(record for record in run if isinstance(record, kind))


def read_comparison(folder: Path, policies: Sequence[str] | None = None) -> Comparison:
    """The records under `folder`, of `policies` in that order.

    Without `policies`: all there are, the baseline first, then by name.

    Raises:
      UserError: no run at all, a named one is missing, or a file is not of records.
    """
    if policies is None:
        found = {path.parent.name for path in folder.glob(f"*/{records.RECORDS_FILE}")}
        policies = sorted(
            found - {SOLO_FOLDER}, key=lambda name: (name != BASELINE, name)
        )
    if not policies:
        raise UserError(
            f"no runs under {folder}: name a folder that `compare` wrote to"
        )
    solo_file = folder / SOLO_FOLDER / records.RECORDS_FILE
    solos = records.read(solo_file) if solo_file.is_file() else ()
    return Comparison(
        runs={
            name: tuple(records.read(folder / name / records.RECORDS_FILE))
            for name in policies
        },
        solos=of_kind(solos, SoloRecord),
    )


def ideal_examples_per_second(solos: Iterable[SoloRecord]) -> float | None:
    """Median over the probes of the sum of the solo rates; None without a probe."""
    rates = [solo.ideal_examples_per_second for solo in solos]
    return statistics.median(rates) if rates else None


def summarise(run: Iterable[Record], ideal: float | None) -> PolicySummary:
    """The summary of one policy's run; `ideal` is in examples/s.

    Raises:
      UserError: the run has no round.
    """
    run = tuple(run)
    rounds = of_kind(run, RoundRecord)
    if not rounds:
        names = [header.policy for header in of_kind(run, RunHeader)] or ["?"]
        raise UserError(
            f"the run of policy {names[0]!r} has no finished round: "
            "leave it out, or let it train an epoch"
        )
    by_epoch = _by_epoch(rounds)
    counted = counted_epochs(rounds)
    epochs = [by_epoch[epoch] for epoch in counted]
    seconds = statistics.median(sum(r.seconds for r in group) for group in epochs)
    examples = statistics.median(sum(r.examples for r in group) for group in epochs)
    rate = _ratio(examples, seconds) or 0.0
    measured = [r for group in epochs for r in group]
    steps = _by_worker(measured, "measured_steps")
    busy = _by_worker(measured, "busy_seconds")
    wait = _by_worker(measured, "wait_seconds")
    total = sum(busy) + sum(wait)
    return PolicySummary(
        policy=rounds[0].policy,
        counted_epochs=counted,
        epoch_seconds=seconds,
        examples_per_second=rate,
        fraction_of_ideal=None if ideal is None else _ratio(rate, ideal),
        utilisation=_ratio(sum(busy), total),
        wait_share=_ratio(sum(wait), total),
        wait_share_by_worker=tuple(
            _ratio(w, b + w) for b, w in zip(busy, wait, strict=True)
        ),
        busy_step_seconds=tuple(map(_ratio, busy, steps)),
        wait_step_seconds=tuple(map(_ratio, wait, steps)),
        spread=_median(_spread(group) for group in epochs),
        rebalances=sum(r.rebalanced for r in rounds),
        compilations=sum(sum(r.compilations) for r in rounds),
        test_accuracy=_last_accuracy(run),
        sizes=rounds[-1].sizes,
    )


def counted_epochs(rounds: Sequence[RoundRecord]) -> tuple[int, ...]:
    """The epochs that rates are taken from: see `PolicySummary`.

    An epoch with fewer examples than the largest was cut short and does not count.
    """
    examples = {
        epoch: sum(r.examples for r in group)
        for epoch, group in _by_epoch(rounds).items()
    }
    whole = [e for e in sorted(examples) if examples[e] == max(examples.values())]
    for first in (FIRST_COUNTED_EPOCH, 1):
        if late := tuple(e for e in whole if e >= first):
            return late
    return tuple(whole)


def compare_json(
    config: str,
    speeds: Sequence[float],
    ideal: float | None,
    summaries: Iterable[PolicySummary],
) -> dict[str, Any]:
    """The object that `compare --json` prints: plain numbers, null for unknown.

    `speeds` are cores a worker, `ideal` is in examples/s.
    """
    return {
        "config": config,
        "speeds": [float(speed) for speed in speeds],
        "ideal_examples_per_second": _plain(ideal),
        "policies": {
            s.policy: {
                "epoch_seconds": _plain(s.epoch_seconds),
                "examples_per_second": _plain(s.examples_per_second),
                "fraction_of_ideal": _plain(s.fraction_of_ideal),
                "utilisation": _plain(s.utilisation),
                "wait_share": _plain(s.wait_share),
                "spread": _plain(s.spread),
                "rebalances": int(s.rebalances),
                "compilations": int(s.compilations),
                "test_accuracy": _plain(s.test_accuracy),
                "sizes": [int(size) for size in s.sizes],
            }
            for s in summaries
        },
    }


def step_seconds(seconds: float, measured_steps: float) -> float | None:
    """Mean seconds a measured step; None without one."""
    return _ratio(seconds, measured_steps)


def _by_epoch(rounds: Iterable[RoundRecord]) -> dict[int, list[RoundRecord]]:
    groups: dict[int, list[RoundRecord]] = {}
    for record in rounds:
        groups.setdefault(record.epoch, []).append(record)
    return groups


def _by_worker(rounds: Iterable[RoundRecord], field: str) -> list[float]:
    """The sum over rounds of a field with one entry a worker."""
    return [
        sum(column) for column in zip(*(getattr(r, field) for r in rounds), strict=True)
    ]


def _spread(rounds: Sequence[RoundRecord]) -> float | None:
    """(max - min) / mean of the workers' busy seconds a step; None if one has none."""
    busy = [
        step_seconds(*totals)
        for totals in zip(
            _by_worker(rounds, "busy_seconds"),
            _by_worker(rounds, "measured_steps"),
            strict=True,
        )
    ]
    known = [b for b in busy if b is not None]
    if len(known) < len(busy):
        return None
    return _ratio(max(known) - min(known), statistics.fmean(known))


def _last_accuracy(run: Iterable[Record]) -> float | None:
    evaluations = of_kind(run, EvaluationRecord)
    return evaluations[-1].metrics.get("accuracy") if evaluations else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _ratio(part: float, whole: float) -> float | None:
    """The quotient; None where it is no number."""
    if not (math.isfinite(part) and math.isfinite(whole) and whole > 0):
        return None
    return part / whole


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)

"""What a run leaves behind: frozen records and the JSON lines they are kept in.

The one schema between the room that measures (`trainer`) and the rooms that read
(`report`, `experiments`). Knows nobody: no JAX, no NumPy, no policy.

A run's file begins with one `RunHeader`; every further line is a `RoundRecord`, an
`EvaluationRecord` or a `SoloRecord`. The file of a probe of the workers, each alone,
may hold `SoloRecord`s only. Each line is one object with its kind in "kind".

The lines are strict JSON, which has no NaN and no infinity: such a number (the loss of
a run that diverged) is written as null and read back as NaN.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from jdlb.errors import UserError

RECORDS_FILE = "records.jsonl"


@dataclasses.dataclass(frozen=True)
class RunHeader:
    """What ran, where: the first line of a records file."""

    policy: str
    config: dict[str, Any]
    workers: int
    processes: int
    global_batch: int
    # CPU budget of each worker in cores; empty when nobody limited them.
    speeds: tuple[float, ...]
    # Name and version of what decides speed: python, jax, platform, device kind.
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """One round: what every worker did, and what was decided at its end.

    Tuples have one entry a worker. Times are seconds. `busy_seconds`,
    `input_seconds` and `wait_seconds` are sums over `measured_steps`, which leave out
    the first step of a new shape and the last partial batch.
    """

    policy: str
    epoch: int
    round: int
    first_step: int
    steps: int
    examples: int
    # Wall time of the round on the lead, compilation included, evaluation not.
    seconds: float
    sizes: tuple[int, ...]
    capacities: tuple[int, ...]
    busy_seconds: tuple[float, ...]
    busy_median_seconds: tuple[float, ...]
    input_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    measured_steps: tuple[int, ...]
    # Compilations of `compute` before this round, and the seconds they took.
    compilations: tuple[int, ...]
    compile_seconds: tuple[float, ...]
    # Means over the examples of the round: the loss and whatever else the user's
    # loss function returned.
    metrics: dict[str, float]
    # Steps whose update was skipped, and how often each worker was the cause.
    skipped_steps: int
    skipped_by_worker: tuple[int, ...]
    # The decision at the end of the round.
    next_sizes: tuple[int, ...]
    rebalanced: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class EvaluationRecord:
    """Exact means over a whole evaluation set after `epoch` (counted from 0)."""

    policy: str
    epoch: int
    # Training seconds since the start of the run, evaluation not included.
    training_seconds: float
    examples: int
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class SoloRecord:
    """What each worker reaches alone: same budget, its balanced share, no `reduce`."""

    sizes: tuple[int, ...]
    step_seconds: tuple[float, ...]

    @property
    def ideal_examples_per_second(self) -> float:
        """Sum of the solo rates."""
        return sum(n / t for n, t in zip(self.sizes, self.step_seconds, strict=True))


Record = RunHeader | RoundRecord | EvaluationRecord | SoloRecord

_KINDS: dict[str, type[Record]] = {
    "run": RunHeader,
    "round": RoundRecord,
    "evaluation": EvaluationRecord,
    "solo": SoloRecord,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_line(record: Record) -> str:
    """One line of strict JSON, without the newline."""
    fields = _plain(dataclasses.asdict(record))
    return json.dumps({"kind": _NAMES[type(record)], **fields}, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_line(line: str) -> Record:
    """The record in one line. Sequences come back as tuples, at any depth.

    Raises:
      UserError: the line is not JSON, of an unknown kind, or has other fields.
    """
    try:
        fields = json.loads(line)
        kind = _KINDS[fields.pop("kind")]
        # A header's config may hold a real None; no other record has one.
        null = None if kind is RunHeader else math.nan
        return kind(**{key: _frozen(v, null) for key, v in fields.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"not a record of this version of jdlb: {line.strip()[:80]!r}: "
            "read it with the version that wrote it, or run again"
        ) from error


def _frozen(value: Any, null: float | None) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(v, null) for key, v in value.items()}
    if isinstance(value, list):
        return tuple(_frozen(v, null) for v in value)
    return null if value is None else value


def write(file: TextIO, record: Record) -> None:
    """Append one record and flush, so that a reader sees whole lines only."""
    file.write(to_line(record) + "\n")
    file.flush()


def read(path: Path) -> Iterator[Record]:
    """The records of one file, in order.

    A last line without its newline, as a killed run leaves it, is left out.

    Raises:
      UserError: the file is missing, or a line is not a record.
    """
    if not path.is_file():
        raise UserError(f"no records at {path}: name the folder that a run wrote to")
    # Bytes that are no text become a line that is no record, hence a `UserError`.
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith("\n"):
                try:
                    yield from_line(line)
                except UserError as error:
                    raise UserError(f"{path}, line {number}: {error}") from error

"""Made-up runs with the shape of real ones: a generator for the tests of this room.

Three workers of 1, 1/2 and 1/4 core, without noise: a step costs every worker a fixed
part and a part a row, and all wait for the slowest.
"""

import dataclasses
from pathlib import Path

from jdlb import records
from jdlb.records import EvaluationRecord, Record, RoundRecord, RunHeader, SoloRecord

SPEEDS = (1.0, 0.5, 0.25)
BATCH = 240
STEPS = 18
EXAMPLES = STEPS * BATCH
SHARES = {
    "equal": ((80, 80, 80),) * 6,
    "static": ((134, 70, 36),) * 6,
    "dlb": ((80, 80, 80), (120, 76, 44)) + ((136, 68, 36),) * 4,
}
ACCURACY = (0.87, 0.925, 0.945, 0.955, 0.96, 0.963)
SOLO = SoloRecord(sizes=(136, 68, 36), step_seconds=(0.34, 0.34, 0.36))


def busy_seconds(size: int, speed: float) -> float:
    """Seconds a step of a worker with `speed` cores."""
    return 0.01 + size / (400.0 * speed)


def make_round(
    policy: str = "dlb",
    epoch: int = 0,
    sizes: tuple[int, ...] = (80, 80, 80),
    next_sizes: tuple[int, ...] | None = None,
    speeds: tuple[float, ...] = SPEEDS,
) -> RoundRecord:
    """One round of a whole epoch."""
    next_sizes = sizes if next_sizes is None else next_sizes
    busy = [busy_seconds(n, s) for n, s in zip(sizes, speeds, strict=True)]
    workers, step = len(sizes), max(busy) + 0.004
    measured = STEPS - 1
    compiled = (1,) * workers if epoch == 0 else (0,) * workers
    return RoundRecord(
        policy=policy,
        epoch=epoch,
        round=epoch,
        first_step=epoch * STEPS,
        steps=STEPS,
        examples=EXAMPLES,
        seconds=STEPS * step + 1.5 * max(compiled),
        sizes=sizes,
        capacities=sizes,
        busy_seconds=tuple(measured * b for b in busy),
        busy_median_seconds=tuple(busy),
        input_seconds=(0.01,) * workers,
        wait_seconds=tuple(measured * (step - b) for b in busy),
        measured_steps=(measured,) * workers,
        compilations=compiled,
        compile_seconds=tuple(1.5 * c for c in compiled),
        metrics={"loss": 0.5 / (epoch + 1), "accuracy": 0.9},
        skipped_steps=0,
        skipped_by_worker=(0,) * workers,
        next_sizes=next_sizes,
        rebalanced=next_sizes != sizes,
        reason="as it was" if next_sizes == sizes else "worker 0 is faster",
    )


def make_run(
    policy: str,
    shares: tuple[tuple[int, ...], ...],
    speeds: tuple[float, ...] = SPEEDS,
) -> tuple[Record, ...]:
    """Header, and a round and an evaluation an epoch."""
    workers = len(speeds)
    header = RunHeader(policy, {}, workers, workers, BATCH, speeds, {"jax": "0.12"})
    run: list[Record] = [header]
    seconds = 0.0
    for epoch, sizes in enumerate(shares):
        following = shares[min(epoch + 1, len(shares) - 1)]
        record = make_round(policy, epoch, sizes, following, speeds)
        seconds += record.seconds
        accuracy = ACCURACY[epoch % len(ACCURACY)]
        run += [
            record,
            EvaluationRecord(policy, epoch, seconds, 500, {"accuracy": accuracy}),
        ]
    return tuple(run)


def make_runs() -> dict[str, tuple[Record, ...]]:
    """One run a policy."""
    return {policy: make_run(policy, shares) for policy, shares in SHARES.items()}


def write_folder(folder: Path) -> None:
    """A compare folder as `compare` leaves it."""
    solos = tuple(
        dataclasses.replace(SOLO, step_seconds=tuple(f * t for t in SOLO.step_seconds))
        for f in (1.0, 0.9, 1.3)
    )
    for name, run in {**make_runs(), "solo": solos}.items():
        path = folder / name / records.RECORDS_FILE
        path.parent.mkdir(parents=True)
        with path.open("w", encoding="utf-8") as file:
            for record in run:
                records.write(file, record)

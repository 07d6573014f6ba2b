"""Records to TensorBoard: scalars over the optimizer steps done.

Written after the fact from records, so that a run needs no writer. Must not know who
measured.
"""

from collections.abc import Iterable
from pathlib import Path

from tensorboardX import SummaryWriter

from jdlb.records import EvaluationRecord, Record, RoundRecord
from jdlb.report.summary import step_seconds

# Marks the event files of this module: only those are replaced.
SUFFIX = ".jdlb"


def write_scalars(run: Iterable[Record], folder: Path) -> None:
    """Write the scalars of one run's records into `folder`, in place of earlier ones.

    Tags: `share/worker_W` (of the batch), `busy_seconds/worker_W`,
    `wait_seconds/worker_W` (a measured step), `train/NAME` and `test/NAME` for every
    metric, `round/seconds`, `round/examples_per_second`. The step is the number of
    optimizer steps done; the time is training seconds since the start.
    """
    for old in folder.glob(f"events.out.tfevents.*{SUFFIX}"):
        old.unlink()
    steps, seconds = 0, 0.0
    with SummaryWriter(str(folder), filename_suffix=SUFFIX) as writer:
        for record in run:
            if isinstance(record, RoundRecord):
                steps += record.steps
                seconds += record.seconds
                scalars = _round_scalars(record)
            elif isinstance(record, EvaluationRecord):
                scalars = {f"test/{k}": v for k, v in record.metrics.items()}
            else:
                continue
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, global_step=steps, walltime=seconds)


def _round_scalars(record: RoundRecord) -> dict[str, float]:
    """Tag to value; a worker without a measured step has no busy and wait time."""
    scalars = {f"train/{name}": value for name, value in record.metrics.items()}
    scalars["round/seconds"] = record.seconds
    if record.seconds > 0:
        scalars["round/examples_per_second"] = record.examples / record.seconds
    total = sum(record.sizes)
    for worker, size in enumerate(record.sizes):
        scalars[f"share/worker_{worker}"] = size / total
        measured = record.measured_steps[worker]
        for name, totals in (
            ("busy_seconds", record.busy_seconds),
            ("wait_seconds", record.wait_seconds),
        ):
            value = step_seconds(totals[worker], measured)
            if value is not None:
                scalars[f"{name}/worker_{worker}"] = value
    return scalars

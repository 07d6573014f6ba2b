"""TensorBoard scalars: what is written is read back from the event file."""

import dataclasses
import struct
from collections import defaultdict
from pathlib import Path

import pytest
import report_samples as samples
from tensorboardX.proto import event_pb2

from jdlb.records import EvaluationRecord
from jdlb.report import scalars

# Generated code, whose classes no type checker sees.
EVENT = vars(event_pb2)["Event"]


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """(step, walltime, value) of every tag, from all event files of a folder."""
    found = defaultdict(list)
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            # A record: length, checksum of the length, payload, its checksum.
            (length,) = struct.unpack("<Q", data[:8])
            event = EVENT.FromString(data[12 : 12 + length])
            data = data[12 + length + 4 :]
            for value in event.summary.value:
                entry = (event.step, event.wall_time, value.simple_value)
                found[value.tag].append(entry)
    return dict(found)


def test_scalars_are_read_back(tmp_path: Path) -> None:
    run = samples.make_run("dlb", samples.SHARES["dlb"])
    scalars.write_scalars(run, tmp_path)
    got = read_scalars(tmp_path)
    assert set(got) == {
        *(
            f"{name}/worker_{worker}"
            for name in ("share", "busy_seconds", "wait_seconds")
            for worker in range(3)
        ),
        "round/seconds",
        "round/examples_per_second",
        "train/loss",
        "train/accuracy",
        "test/accuracy",
    }
    steps, times, shares = zip(*got["share/worker_1"], strict=True)
    assert steps == tuple(samples.STEPS * n for n in range(1, 7))
    assert shares == pytest.approx([80 / 240, 76 / 240, *[68 / 240] * 4])
    assert times == pytest.approx(
        [r.training_seconds for r in run if isinstance(r, EvaluationRecord)]
    )
    assert got["test/accuracy"][-1] == pytest.approx((108, times[-1], 0.963))
    assert got["train/loss"][1][2] == pytest.approx(0.25)
    expected = samples.busy_seconds(36, 0.25)
    assert got["busy_seconds/worker_2"][-1][2] == pytest.approx(expected)
    makespan = samples.busy_seconds(36, 0.25) + 0.004
    waits = makespan - samples.busy_seconds(136, 1.0)
    assert got["wait_seconds/worker_0"][-1][2] == pytest.approx(waits)


def test_a_second_report_replaces_the_first(tmp_path: Path) -> None:
    foreign = tmp_path / "events.out.tfevents.1.elsewhere"
    foreign.write_bytes(b"")
    run = samples.make_run("dlb", samples.SHARES["dlb"])
    scalars.write_scalars(run, tmp_path)
    (first,) = tmp_path.glob("*.jdlb")
    # As if a second had passed: the name holds the time.
    first.rename(tmp_path / f"events.out.tfevents.2.host{scalars.SUFFIX}")
    scalars.write_scalars(run, tmp_path)
    assert len(read_scalars(tmp_path)["train/loss"]) == 6
    assert foreign.exists()


def test_an_unmeasured_worker_has_no_busy_time(tmp_path: Path) -> None:
    record = dataclasses.replace(samples.make_round(), measured_steps=(5, 0, 5))
    scalars.write_scalars([record], tmp_path)
    got = read_scalars(tmp_path)
    assert "busy_seconds/worker_0" in got
    assert "busy_seconds/worker_1" not in got
    assert "share/worker_1" in got

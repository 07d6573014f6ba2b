"""The record schema: what is written comes back, and what is foreign is refused."""

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdlb import records
from jdlb.errors import UserError

HEADER = records.RunHeader(
    policy="dlb",
    config={"name": "mnist5k", "shares": None, "crop": {"pads": (2, (3, 4))}},
    workers=2,
    processes=2,
    global_batch=24,
    speeds=(1.0, 0.5),
    versions={"python": "3.13"},
)
ROUND = records.RoundRecord(
    policy="dlb",
    epoch=1,
    round=1,
    first_step=10,
    steps=10,
    examples=240,
    seconds=2.5,
    sizes=(16, 8),
    capacities=(16, 8),
    busy_seconds=(0.9, 1.8),
    busy_median_seconds=(0.1, 0.2),
    input_seconds=(0.01, 0.02),
    wait_seconds=(0.9, 0.0),
    measured_steps=(9, 9),
    compilations=(1, 0),
    compile_seconds=(0.5, 0.0),
    metrics={"loss": 0.25, "accuracy": 0.9},
    skipped_steps=0,
    skipped_by_worker=(0, 0),
    next_sizes=(18, 6),
    rebalanced=True,
    reason="worker 0 is faster",
)
EVALUATION = records.EvaluationRecord("dlb", 1, 5.25, 500, {"accuracy": 0.95})
SOLO = records.SoloRecord(sizes=(16, 8), step_seconds=(0.1, 0.2))
ALL = (HEADER, ROUND, EVALUATION, SOLO)


def write_all(path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in ALL:
            records.write(file, record)


def refuse_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("record", ALL, ids=lambda r: type(r).__name__)
def test_a_record_comes_back_as_it_was(record: records.Record) -> None:
    line = records.to_line(record)
    assert "\n" not in line
    assert records.from_line(line) == record


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_seconds_come_back_bit_for_bit(seconds: list[float]) -> None:
    record = dataclasses.replace(ROUND, busy_seconds=tuple(seconds))
    assert records.from_line(records.to_line(record)) == record


@given(st.text())
def test_any_text_stays_one_line(reason: str) -> None:
    file = io.StringIO()
    record = dataclasses.replace(ROUND, reason=reason)
    records.write(file, record)
    assert file.getvalue().count("\n") == 1
    assert records.from_line(file.getvalue()) == record


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_diverged_run_writes_strict_json(loss: float) -> None:
    record = dataclasses.replace(
        ROUND, metrics={"loss": loss}, busy_median_seconds=(0.1, loss)
    )
    line = records.to_line(record)
    json.loads(line, parse_constant=refuse_constant)
    back = records.from_line(line)
    assert isinstance(back, records.RoundRecord)
    assert math.isnan(back.metrics["loss"])
    assert back.busy_median_seconds[0] == 0.1
    assert math.isnan(back.busy_median_seconds[1])


def test_a_file_comes_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / records.RECORDS_FILE
    write_all(path)
    assert tuple(records.read(path)) == ALL


def test_every_record_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / records.RECORDS_FILE
    with path.open("w", encoding="utf-8") as file:
        records.write(file, ROUND)
        assert list(records.read(path)) == [ROUND]


def test_the_cut_line_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / records.RECORDS_FILE
    write_all(path)
    path.write_bytes(path.read_bytes()[:-5])
    assert tuple(records.read(path)) == ALL[:-1]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no records at .*absent"):
        list(records.read(tmp_path / "absent"))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "not json",
        "[1, 2]",
        "7",
        '{"sizes": [1]}',
        '{"kind": "swim"}',
        '{"kind": ["run"]}',
        '{"kind": "solo", "sizes": [1]}',
        '{"kind": "solo", "sizes": [1], "step_seconds": [1], "more": 1}',
    ],
)
def test_a_foreign_line_is_a_user_error(line: str) -> None:
    with pytest.raises(UserError, match="not a record") as caught:
        records.from_line(line)
    assert "\n" not in str(caught.value)


def test_a_foreign_line_in_a_file_is_located(tmp_path: Path) -> None:
    path = tmp_path / records.RECORDS_FILE
    write_all(path)
    with path.open("ab") as file:
        file.write(b"\xff\xfe\n")
    with pytest.raises(UserError, match=r"records\.jsonl, line 5: not a record"):
        list(records.read(path))


def test_the_ideal_is_the_sum_of_the_solo_rates() -> None:
    assert SOLO.ideal_examples_per_second == pytest.approx(160.0 + 40.0)

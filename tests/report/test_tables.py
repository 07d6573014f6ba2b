"""The comparison table and the log line, as a terminal shows them."""

import dataclasses

import pytest
import report_samples as samples
from rich.console import Console

from jdlb.report import summary, tables

MACHINE = "2 cores [shared], Linux, JAX 0.12.0.1"


def show(width: int = 100, **changes: object) -> str:
    ideal = samples.SOLO.ideal_examples_per_second
    summaries = [
        dataclasses.replace(summary.summarise(run, ideal), **changes)
        for run in samples.make_runs().values()
    ]
    table = tables.comparison_table(
        summaries, speeds=samples.SPEEDS, ideal=ideal, machine=MACHINE
    )
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def row(text: str, policy: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.split()[:1] == [policy])
    return line.split()


def test_one_row_a_policy_with_its_numbers() -> None:
    text = show()
    # 18 steps of 0.364 s: 4,320 examples in 6.55 s; the ideal is 700 examples/s.
    assert row(text, "dlb")[1:4] == ["6.73", "642", "92"]
    assert row(text, "dlb")[7:] == ["2", "3", "96.30", "136/68/36"]
    assert row(text, "equal")[4:7] == ["59", "41", "1.259"]
    order = [text.index(f"\n{name} ") for name in ("equal", "static", "dlb")]
    assert order == sorted(order)


def test_it_fits_100_columns_uncut() -> None:
    text = show(sizes=(100, 100, 100, 100), examples_per_second=123456.0)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text


def test_numbers_are_aligned_to_the_right() -> None:
    ends = {
        line.index(row(text, name)[1]) + len(row(text, name)[1])
        for text in [show()]
        for name in ("equal", "static", "dlb")
        for line in text.splitlines()
        if line.split()[:1] == [name]
    }
    assert len(ends) == 1


def test_units_are_not_taken_for_markup() -> None:
    text = show()
    for unit in ("[s]", "[examples", "[%]", "[shared]"):
        assert unit in text


def test_the_caption_names_the_conditions() -> None:
    text = " ".join(show().split())
    assert "CPU budgets: 1/0.5/0.25 cores" in text
    assert "alone): 700 examples/s" in text
    assert MACHINE in text
    assert "epochs 2-5" in text
    assert "wall clock" in text


def test_a_virtual_clock_is_never_silent() -> None:
    table = tables.comparison_table(
        [], speeds=(), ideal=None, machine="m", virtual=True
    )
    assert "virtual clock" in str(table.caption)
    assert "wall clock" not in str(table.caption)
    assert "not limited" in str(table.caption)


def test_unknown_is_a_dash() -> None:
    text = show(utilisation=None, spread=None, test_accuracy=None)
    assert [row(text, "dlb")[i] for i in (4, 6, 9)] == ["-", "-", "-"]


def test_the_line_of_a_round() -> None:
    record = samples.make_round(sizes=(120, 76, 44), next_sizes=(136, 68, 36))
    line = tables.round_line(record)
    assert "\n" not in line
    assert line == (
        "dlb epoch 0  9.67 s  loss 0.5000  sizes 120/76/44  "
        "busy 310/390/450 ms/step  worker 0 is faster"
    )


def test_the_line_of_a_round_with_trouble() -> None:
    record = dataclasses.replace(
        samples.make_round(), metrics={}, measured_steps=(17, 0, 17), skipped_steps=3
    )
    line = tables.round_line(record)
    assert "loss -" in line
    assert "busy 210/-/810 ms/step" in line
    assert "3 steps skipped" in line


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1] * 8, "1/1/1/1/1/1/1/1"), ([*range(9)], "0..8 (9)"), ([None] * 9, "-..- (9)")],
)
def test_many_workers_become_a_range(values: list[int], expected: str) -> None:
    assert tables.per_worker(values, "d") == expected

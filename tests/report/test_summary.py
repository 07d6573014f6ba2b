"""The numbers of `compare`: hand-computed values, missing measures, strict JSON."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import report_samples as samples
from hypothesis import given
from hypothesis import strategies as st

from jdlb.errors import UserError
from jdlb.records import EvaluationRecord, RoundRecord
from jdlb.report import summary


def round_of(epoch: int, seconds: float = 2.0, **changes: object) -> RoundRecord:
    """Two workers, 10 steps, 8 measured; busy 0.1 and 0.3 s, wait 0.2 and 0 s a step."""
    record = samples.make_round(epoch=epoch, sizes=(16, 8), speeds=(1.0, 1.0))
    record = dataclasses.replace(
        record,
        seconds=seconds,
        examples=240,
        busy_seconds=(0.8, 2.4),
        wait_seconds=(1.6, 0.0),
        measured_steps=(8, 8),
        compilations=(1, 2),
    )
    return dataclasses.replace(record, **changes)


def test_numbers_of_a_small_run() -> None:
    run = [
        round_of(0, seconds=90.0, rebalanced=True),
        round_of(1, seconds=80.0),
        round_of(2, seconds=3.0),
        EvaluationRecord("dlb", 2, 173.0, 500, {"accuracy": 0.5}),
        round_of(3, seconds=2.0),
        round_of(4, seconds=7.0, sizes=(18, 6), next_sizes=(20, 4), rebalanced=True),
        EvaluationRecord("dlb", 4, 182.0, 500, {"accuracy": 0.75}),
    ]
    got = summary.summarise(run, ideal=160.0)
    assert got.policy == "dlb"
    assert got.counted_epochs == (2, 3, 4)
    assert got.epoch_seconds == 3.0
    assert got.examples_per_second == 80.0
    assert got.fraction_of_ideal == 0.5
    assert got.utilisation == pytest.approx(3.2 / 4.8)
    assert got.wait_share == pytest.approx(1.6 / 4.8)
    assert got.wait_share_by_worker == pytest.approx((2 / 3, 0.0))
    assert got.busy_step_seconds == pytest.approx((0.1, 0.3))
    assert got.wait_step_seconds == pytest.approx((0.2, 0.0))
    assert got.spread == pytest.approx(1.0)
    assert got.rebalances == 2
    assert got.compilations == 15
    assert got.test_accuracy == 0.75
    assert got.sizes == (18, 6)


@pytest.mark.parametrize(
    ("epochs", "counted"),
    [(1, (0,)), (2, (1,)), (3, (2,)), (5, (2, 3, 4))],
)
def test_which_epochs_count(epochs: int, counted: tuple[int, ...]) -> None:
    rounds = [round_of(epoch) for epoch in range(epochs)]
    assert summary.counted_epochs(rounds) == counted


def test_an_epoch_cut_short_does_not_count() -> None:
    rounds = [round_of(e) for e in range(4)]
    rounds.append(round_of(4, seconds=0.5, examples=60))
    assert summary.counted_epochs(rounds) == (2, 3)
    assert summary.summarise(rounds, None).epoch_seconds == 2.0


def test_rounds_of_an_epoch_are_summed() -> None:
    half = {"examples": 120, "rebalanced": True}
    rounds = [round_of(e, seconds=1.0, **half) for e in (0, 0, 1, 1, 2, 2)]
    got = summary.summarise(rounds, None)
    assert got.epoch_seconds == 2.0
    assert got.examples_per_second == 120.0
    assert got.rebalances == 6


def test_spread_is_of_seconds_a_step_and_a_median_over_epochs() -> None:
    rounds = [
        round_of(2, busy_seconds=(1.0, 1.0), measured_steps=(10, 5)),
        round_of(3, busy_seconds=(1.0, 1.0), measured_steps=(5, 5)),
        round_of(4, busy_seconds=(1.0, 9.0), measured_steps=(5, 5)),
    ]
    assert summary.summarise(rounds, None).spread == pytest.approx(0.1 / 0.15)


def test_a_worker_without_measured_steps() -> None:
    unmeasured = round_of(
        2, busy_seconds=(0.8, 0.0), wait_seconds=(1.6, 0.0), measured_steps=(8, 0)
    )
    got = summary.summarise([unmeasured], 100.0)
    assert got.spread is None
    assert got.busy_step_seconds == pytest.approx((0.1, None))
    assert got.wait_share_by_worker == pytest.approx((2 / 3, None))
    assert got.wait_share == pytest.approx(2 / 3)
    # Another epoch that knows all workers is enough for a spread.
    both = summary.summarise([unmeasured, round_of(3)], 100.0)
    assert both.spread == pytest.approx(1.0)


def test_nothing_measured_at_all() -> None:
    zero = (0.0, 0.0)
    run = [round_of(0, busy_seconds=zero, wait_seconds=zero, measured_steps=(0, 0))]
    got = summary.summarise(run, None)
    assert got.utilisation is None
    assert got.wait_share is None
    assert got.spread is None
    assert got.fraction_of_ideal is None
    assert got.test_accuracy is None
    assert got.examples_per_second == 120.0


def test_a_run_without_rounds_says_so() -> None:
    run = samples.make_run("dlb", ())
    with pytest.raises(UserError, match="policy 'dlb' has no finished round"):
        summary.summarise(run, None)
    with pytest.raises(UserError, match="no finished round"):
        summary.summarise([], None)


def test_the_ideal_is_the_median_of_the_probes() -> None:
    solos = [
        dataclasses.replace(samples.SOLO, sizes=(10,), step_seconds=(t,))
        for t in (1.0, 0.1, 0.5)
    ]
    assert summary.ideal_examples_per_second(solos) == 20.0
    assert summary.ideal_examples_per_second([]) is None


def refuse_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def test_the_object_of_compare() -> None:
    runs = [summary.summarise(run, 700.0) for run in samples.make_runs().values()]
    got = summary.compare_json("mnist5k", samples.SPEEDS, 700.0, runs)
    assert list(got) == ["config", "speeds", "ideal_examples_per_second", "policies"]
    assert list(got["policies"]) == ["equal", "static", "dlb"]
    assert list(got["policies"]["dlb"]) == [
        "epoch_seconds",
        "examples_per_second",
        "fraction_of_ideal",
        "utilisation",
        "wait_share",
        "spread",
        "rebalances",
        "compilations",
        "test_accuracy",
        "sizes",
    ]
    assert got["policies"]["dlb"]["sizes"] == [136, 68, 36]
    assert got["policies"]["dlb"]["rebalances"] == 2
    assert json.loads(json.dumps(got, allow_nan=False)) == got


finite_or_not = st.one_of(st.floats(0.0, 1e9), st.just(math.nan))


@given(st.lists(finite_or_not, min_size=2, max_size=2), st.integers(0, 3))
def test_the_object_is_strict_json_whatever_was_measured(
    seconds: list[float], measured: int
) -> None:
    run = [
        round_of(
            2,
            busy_seconds=tuple(seconds),
            wait_seconds=tuple(reversed(seconds)),
            measured_steps=(measured, 1),
        ),
        EvaluationRecord("dlb", 2, 1.0, 5, {"accuracy": seconds[0]}),
    ]
    got = summary.compare_json("c", (), None, [summary.summarise(run, 5.0)])
    line = json.dumps(got, allow_nan=False)
    json.loads(line, parse_constant=refuse_constant)


@given(
    st.lists(st.tuples(st.floats(1e-3, 10), st.floats(0, 10)), min_size=1, max_size=5)
)
def test_utilisation_and_wait_share_complete_each_other(
    seconds: list[tuple[float, float]],
) -> None:
    busy, wait = zip(*seconds, strict=True)
    run = [
        round_of(
            0, busy_seconds=busy, wait_seconds=wait, measured_steps=(4,) * len(busy)
        )
    ]
    got = summary.summarise(run, None)
    assert got.utilisation is not None
    assert got.wait_share is not None
    assert got.utilisation + got.wait_share == pytest.approx(1.0)
    assert 0.0 < got.utilisation <= 1.0


def test_a_compare_folder_is_read_baseline_first(tmp_path: Path) -> None:
    samples.write_folder(tmp_path)
    got = summary.read_comparison(tmp_path)
    assert list(got.runs) == ["equal", "dlb", "static"]
    assert got.runs == samples.make_runs()
    assert got.speeds == samples.SPEEDS
    assert got.ideal_examples_per_second == pytest.approx(
        samples.SOLO.ideal_examples_per_second
    )
    assert [s.policy for s in got.summaries] == ["equal", "dlb", "static"]


def test_a_stated_order_is_kept(tmp_path: Path) -> None:
    samples.write_folder(tmp_path)
    assert list(summary.read_comparison(tmp_path, ["static", "equal"]).runs) == [
        "static",
        "equal",
    ]


def test_a_folder_without_solo_has_no_ideal(tmp_path: Path) -> None:
    samples.write_folder(tmp_path)
    (tmp_path / "solo" / "records.jsonl").unlink()
    got = summary.read_comparison(tmp_path)
    assert got.ideal_examples_per_second is None
    assert got.summaries[0].fraction_of_ideal is None


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no runs under .*: name a folder"):
        summary.read_comparison(tmp_path)


def test_a_missing_policy_is_named(tmp_path: Path) -> None:
    samples.write_folder(tmp_path)
    with pytest.raises(UserError, match=r"no records at .*lbb"):
        summary.read_comparison(tmp_path, ["equal", "lbb"])

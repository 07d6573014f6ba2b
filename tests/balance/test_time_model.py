"""Curves rise and invert; the fitted model follows changes, not single outliers."""

import math
import pickle

import numpy as np
import pytest

from jdlb.balance.curves import Curves
from jdlb.balance.time_model import TimeModel
from jdlb.balance.time_tables import GTX_750, GTX_1070, TimeTable
from jdlb.errors import UserError


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def learnt(model: TimeModel, batches, times, noise=0.0, seed=0) -> TimeModel:
    """The model after measures of one worker at these batches, one a round."""
    generator = np.random.default_rng(seed)
    for batch in batches:
        seconds = times(batch) * np.exp(noise * generator.standard_normal())
        model = model.update(array(batch), array(seconds))
    return model


def believed(model: TimeModel, batch: float) -> float:
    return float(model.curves.seconds(array(batch))[0])


def affine(batch: float) -> float:
    return 0.5 + 0.01 * batch


def bent(batch: float) -> float:
    """A cliff at 100: each example beyond costs three times as much."""
    return 0.2 + 0.01 * batch + 0.02 * max(batch - 100, 0)


def test_tables_are_interpolated_and_inverted() -> None:
    curves = Curves.of_tables([GTX_1070, GTX_750])
    assert curves.seconds(array(128, 24)) == pytest.approx([0.143, 0.23365])
    assert curves.seconds(array(1, 1)) == pytest.approx([0.0146, 0.0517])
    beyond = 0.2655 + (0.2655 - 0.143) / 128 * 100
    assert curves.seconds(array(356, 16))[0] == pytest.approx(beyond)
    for seconds in (0.06, 0.2, 1.0):
        batches = curves.within(seconds)
        assert curves.seconds(batches) == pytest.approx([seconds] * 2)
    # Not even an empty batch would be in time.
    assert curves.within(0.01) == pytest.approx([0, 0])


def test_single_values_are_those_of_arrays() -> None:
    curves = Curves.of_tables([GTX_1070, GTX_750])
    one = curves.one()
    for batch in (1, 2, 3, 100, 256, 300):
        both = curves.seconds(np.full(2, float(batch)))
        assert [one(0, batch), one(1, batch)] == pytest.approx(list(both))


def test_a_table_that_falls_is_made_to_rise_by_the_least() -> None:
    table = TimeTable("wavy", (10, 20, 30, 40), (1.0, 3.0, 2.0, 4.0))
    curves = Curves.of_tables([table])
    at = [float(curves.seconds(array(b))[0]) for b in (10, 20, 25, 30, 40)]
    assert at == pytest.approx([1.0, 2.5, 2.5, 2.5, 4.0])


def test_rows_of_unlike_length_and_flat_ends_stay_apart() -> None:
    short = TimeTable("short", (0, 10), (0.0, 1.0))
    flat = TimeTable("flat", (5, 10, 20), (1.0, 2.0, 2.0))
    curves = Curves.of_tables([short, flat])
    assert curves.seconds(array(5, 100)) == pytest.approx([0.5, 2.0], rel=1e-4)
    assert np.all(np.isfinite(curves.within(3.0)))


def test_an_affine_machine_is_known_after_two_batches() -> None:
    model = learnt(TimeModel.create(1), [100, 40, 60], affine)
    for batch in (20, 80, 150):
        assert believed(model, batch) == pytest.approx(affine(batch), rel=0.02)
    assert model.two_batches_seen.all()


def test_one_batch_alone_is_proportional() -> None:
    model = learnt(TimeModel.create(1), [100] * 3, affine)
    assert not model.two_batches_seen.any()
    assert believed(model, 50) == pytest.approx(affine(100) / 2)


def test_a_bend_is_learnt_where_it_is_allowed() -> None:
    batches = [60, 100, 140, 180] * 4
    model = learnt(TimeModel.create(1), batches, bent)
    for batch in (60, 80, 100, 120, 180):
        assert believed(model, batch) == pytest.approx(bent(batch), rel=0.03)
    line = learnt(TimeModel.create(1, bend=0.0), batches, bent)
    assert abs(believed(line, 100) / bent(100) - 1) > 0.1
    exact = learnt(TimeModel.create(1, bend=math.inf), batches, bent)
    assert believed(exact, 120) == pytest.approx(bent(120), rel=1e-6)


@pytest.mark.parametrize("bend", [0.0, 0.1])
def test_errors_are_as_large_as_said(bend: float) -> None:
    """Of 400 models the mean square of (error / standard error) is about 1.

    A little above where the line is bent: how much is decided by the same measures.
    """
    workers, noise = 400, 0.05
    generator = np.random.default_rng(0)
    model = TimeModel.create(workers, bend=bend)
    for round_ in range(30):
        batches = np.full(workers, (80.0, 100.0, 120.0)[round_ // 2 % 3])
        factor = np.exp(noise * generator.standard_normal(workers))
        model = model.update(batches, (0.5 + 0.01 * batches) * factor)
    assert np.mean(model.deviation) == pytest.approx(noise, rel=0.2)
    for batch in (80.0, 100.0, 130.0):
        batches = np.full(workers, batch)
        off = model.curves.seconds(batches) - affine(batch)
        ratio = np.sqrt(np.mean((off / model.standard_error(batches)) ** 2))
        assert 0.3 < ratio < 1.7


def test_noise_is_averaged_and_no_noise_is_none() -> None:
    noisy = learnt(TimeModel.create(1), [100] * 60, affine, noise=0.05)
    assert noisy.deviation[0] == pytest.approx(0.05, rel=0.4)
    assert noisy.standard_error(array(100))[0] < 0.05 * affine(100)
    assert believed(noisy, 100) == pytest.approx(affine(100), rel=0.06)
    calm = learnt(TimeModel.create(1), [100] * 60, affine)
    assert calm.deviation[0] < 0.002


def test_errors_grow_away_from_what_was_seen() -> None:
    model = learnt(TimeModel.create(1), [90, 100, 110] * 5, affine, noise=0.02)
    near, far = (float(model.standard_error(array(b))[0]) for b in (100, 300))
    assert far > 2 * near


@pytest.mark.parametrize("factor", [10.0, 2.0, 0.3])
@pytest.mark.parametrize("bend", [0.0, 0.1, math.inf])
def test_one_hiccup_changes_nothing(factor: float, bend: float) -> None:
    model = learnt(TimeModel.create(1, bend=bend), [100, 60] * 5, affine)
    before = [believed(model, b) for b in (40, 60, 100, 150)]
    hit = model.update(array(60), array(factor * affine(60)))
    # But for how noisy measures are taken to be.
    now = [believed(hit, b) for b in (40, 60, 100, 150)]
    assert now == pytest.approx(before, rel=0.01)
    after = learnt(hit, [60], affine)
    again = [believed(after, b) for b in (40, 60, 100, 150)]
    assert again == pytest.approx(before, rel=0.01)
    # Two that are not in a row are two hiccups.
    twice = after.update(array(60), array(factor * affine(60)))
    assert believed(twice, 60) == pytest.approx(affine(60), rel=0.01)


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.3])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_lasting_change_is_believed_after_two_rounds(factor, noise) -> None:
    model = learnt(TimeModel.create(1), [100, 60, 60, 60] * 4, affine, noise)

    def slower(batch: float) -> float:
        return factor * affine(batch)

    model = learnt(model, [60, 60], slower, noise, seed=1)
    assert believed(model, 60) == pytest.approx(slower(60), rel=0.05)
    # Its form is kept: a machine twice as slow is so at all batches.
    assert believed(model, 100) == pytest.approx(slower(100), rel=0.1)


def test_a_change_that_a_second_measure_bears_out_is_believed_at_once() -> None:
    model = learnt(TimeModel.create(1), [100, 60] * 5, affine)
    slow = array(2 * affine(60))
    changed = model.update(array(60), slow, witness=slow)
    assert believed(changed, 60) == pytest.approx(2 * affine(60), rel=1e-3)
    usual = model.update(array(60), slow, witness=array(affine(60)))
    assert believed(usual, 60) == pytest.approx(affine(60), rel=0.01)


def test_a_new_batch_tells_of_the_form_first() -> None:
    """Known at one batch: at a third of it all from a third to the same time is fair."""
    model = learnt(TimeModel.create(1), [90] * 3, affine)
    for seconds in (0.5, 0.8, 1.3):
        assert model.side(array(30), array(seconds)) == 0
    assert model.side(array(30), array(0.2)) == -1
    assert model.side(array(30), array(3.0)) == 1
    # Twice as many: from the same time to four times of it.
    for seconds in (1.5, 2.8, 5.0):
        assert model.side(array(180), array(seconds)) == 0
    assert model.side(array(180), array(1.0)) == -1
    assert model.side(array(180), array(7.0)) == 1


def test_the_slope_is_kept_however_long_nothing_moves() -> None:
    model = learnt(TimeModel.create(1, bend=0.0), [100, 40, 100], affine)
    before = believed(model, 40) / believed(model, 100)
    model = learnt(model, [100] * 5000, affine)
    assert believed(model, 40) / believed(model, 100) == pytest.approx(before, rel=0.2)
    assert np.isfinite(model.curves.points[0, :2]).all()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0, 1e-320, 1e300])
def test_what_is_no_time_teaches_nothing(seconds: float) -> None:
    fresh = TimeModel.create(1).update(array(10), array(seconds))
    assert not fresh.seen.any()
    model = learnt(fresh, [100, 60] * 3, affine)
    after = model.update(array(60), array(seconds))
    assert believed(after, 80) == believed(model, 80)
    assert not np.isnan(after.covariance).any()


def test_a_worker_never_measured_is_like_the_others() -> None:
    model = TimeModel.create(3).update(array(10, 10, 10), array(1.0, 2.0, math.nan))
    # The mean speed of 10 and 5 examples a second.
    assert model.curves.seconds(array(10, 10, 15)) == pytest.approx([1, 2, 2])
    nothing = TimeModel.create(2)
    assert nothing.curves.seconds(array(3, 3)) == pytest.approx([3, 3])


def test_workers_do_not_touch_each_other_and_models_are_values() -> None:
    alone = learnt(TimeModel.create(1), [100, 60, 80], affine)
    both = TimeModel.create(2)
    for batch in (100.0, 60.0, 80.0):
        kept = pickle.loads(pickle.dumps(both))
        later = both.update(array(batch, 5), array(affine(batch), 0.1))
        for name, value in vars(kept).items():
            assert np.array_equal(value, getattr(both, name), equal_nan=True)
        both = later
    assert both.curves.seconds(array(70, 5))[0] == pytest.approx(
        believed(alone, 70), rel=1e-3
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TimeModel.create(1, forgetting=1.0), "forgetting 1.0"),
        (lambda: TimeModel.create(1, forgetting=-0.1), "forgetting -0.1"),
        (lambda: TimeModel.create(1, forgetting=math.nan), "forgetting nan"),
        (lambda: TimeModel.create(1, bend=-1.0), "bend -1.0"),
        (lambda: TimeModel.create(1, bend=math.nan), "bend nan"),
    ],
)
def test_bad_options_are_told(build, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        build()
    assert "\n" not in str(error.value)

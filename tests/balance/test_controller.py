"""Decisions: when sizes move, what is said, and what caps and dry runs do to it."""

import dataclasses
import re

import pytest

from jdlb.balance import policies
from jdlb.balance.allocation import Limits
from jdlb.balance.controller import Controller
from jdlb.balance.policies.protocol import Cluster, Observation
from jdlb.errors import UserError


def observe(allocation, seconds_per_row) -> Observation:
    """Ten steps of workers that need that many seconds a row."""
    per_step = tuple(
        c * a for c, a in zip(allocation.capacities, seconds_per_row, strict=True)
    )
    nothing = (0.0,) * len(per_step)
    return Observation(
        round=0,
        sizes=allocation.sizes,
        capacities=allocation.capacities,
        busy_seconds=tuple(10 * t for t in per_step),
        busy_median_seconds=per_step,
        busy_spread_seconds=nothing,
        input_seconds=nothing,
        wait_seconds=nothing,
        measured_steps=(10,) * len(per_step),
    )


def exact(policy: str = "dlb", **settings) -> Controller:
    """Four workers, B = 240, every size its own capacity."""
    cluster = Cluster.create(4, 240, granule=1, growth=0.0)
    return Controller(policies.get(policy), cluster, aligned=False, **settings)


def test_the_start_is_equal_and_moves_nothing() -> None:
    decision, state = exact().start()
    assert decision.allocation.sizes == (60, 60, 60, 60)
    assert decision.proposed == (60, 60, 60, 60)
    assert not decision.changed
    assert state.allocation == decision.allocation


def test_a_move_names_its_largest_and_the_predicted_makespan() -> None:
    controller = exact()
    decision, state = controller.start()
    seen = observe(decision.allocation, (0.001, 0.001, 0.001, 0.004))
    decision, state = controller.decide(seen, state)
    assert decision.allocation.sizes == (74, 74, 74, 18)
    assert decision.changed
    assert decision.reason == (
        "shares moved: worker 3 60 -> 18 and 3 more; "
        "predicted makespan 0.24 s -> 0.074 s"
    )
    assert state.allocation == decision.allocation


def test_the_same_sizes_are_kept() -> None:
    controller = exact()
    decision, state = controller.start()
    decision, _ = controller.decide(observe(decision.allocation, (0.001,) * 4), state)
    assert not decision.changed
    assert decision.reason == "kept: the policy asks for the same sizes"


def test_a_move_inside_the_dead_band_is_not_made() -> None:
    controller = exact(dead_band=0.02)
    decision, state = controller.start()
    start = decision.allocation
    decision, state = controller.decide(observe(start, (1.0, 1.0, 1.0, 1.022)), state)
    assert decision.proposed == (61, 60, 60, 59)
    assert decision.allocation == start
    assert not decision.changed
    assert decision.reason == (
        "kept: largest move 1.7 % is inside the dead band of 2 %"
    )
    # One worker beyond the band is enough, and then all move.
    decision, _ = controller.decide(observe(start, (1.0, 1.0, 1.0, 1.05)), state)
    assert decision.changed
    assert decision.allocation.sizes == decision.proposed


def test_a_move_of_exactly_the_dead_band_is_not_made() -> None:
    controller = exact(dead_band=1 / 60)
    decision, state = controller.start()
    seen = observe(decision.allocation, (1.0, 1.0, 1.0, 1.022))
    decision, _ = controller.decide(seen, state)
    assert decision.proposed == (61, 60, 60, 59)
    assert not decision.changed


def test_a_dry_run_decides_and_tells_but_moves_nothing() -> None:
    controller = exact(dry_run=True)
    decision, state = controller.start()
    seen = observe(decision.allocation, (0.001, 0.001, 0.001, 0.004))
    decision, state = controller.decide(seen, state)
    assert decision.allocation.sizes == (60, 60, 60, 60)
    assert decision.proposed == (74, 74, 74, 18)
    assert not decision.changed
    assert decision.reason.startswith("dry run, kept: shares moved: worker 3 60 -> 18")
    assert state.allocation.sizes == (60, 60, 60, 60)


def test_lower_caps_hold_at_once_even_in_a_dry_run() -> None:
    controller = exact(dry_run=True, dead_band=0.9)
    _, state = controller.start()
    lower = controller.with_caps([240, 240, 240, 50])
    decision, state = lower.reallocate(state)
    assert decision.allocation.sizes == (64, 63, 63, 50)
    assert decision.changed
    assert "caps are now" in decision.reason
    again, _ = lower.reallocate(state)
    assert not again.changed


def test_a_decision_never_keeps_what_is_above_a_cap() -> None:
    controller = exact(dry_run=True, dead_band=0.9)
    start, state = controller.start()
    lower = controller.with_caps([240, 240, 240, 50])
    decision, _ = lower.decide(observe(start.allocation, (0.001,) * 4), state)
    assert decision.allocation.sizes[3] == 50
    assert "above its cap" in decision.reason


def test_floors_come_down_to_caps() -> None:
    cluster = Cluster.create(2, 64, granule=16)
    lower = Controller(policies.get("dlb"), cluster).with_caps([64, 5])
    assert lower.cluster.limits.floors == (16, 5)
    assert lower.start()[0].allocation.sizes == (59, 5)


def test_every_reason_is_one_line() -> None:
    controller = exact()
    decision, state = controller.start()
    for speeds in ((1e-3, 1e-3, 1e-3, 1e-9), (float("nan"),) * 4, (1.0,) * 4):
        assert re.fullmatch(r"[^\n]+", decision.reason)
        decision, state = controller.decide(observe(decision.allocation, speeds), state)


@pytest.mark.parametrize("dead_band", [-0.1, 1.0, float("nan")])
def test_a_dead_band_is_a_fraction(dead_band: float) -> None:
    with pytest.raises(UserError, match="dead band"):
        exact(dead_band=dead_band)


def test_caps_too_low_for_the_batch_are_told() -> None:
    with pytest.raises(UserError, match="above the sum of caps, 200"):
        exact().with_caps([50] * 4)


def told_programs(observation: Observation, seconds: float) -> Observation:
    """The same round, begun with one new program a worker."""
    workers = len(observation.sizes)
    return dataclasses.replace(
        observation,
        compilations=(1,) * workers,
        compile_seconds=(seconds,) * workers,
    )


def test_a_new_program_must_pay_in_the_rest_of_the_run() -> None:
    controller = exact()
    decision, state = controller.start()
    seen = observe(decision.allocation, (0.001, 0.001, 0.001, 0.004))
    seen = told_programs(seen, seconds=2.0)
    # Saves 0.24 - 0.074 = 0.166 s a step: 12 steps do not pay for 2 s, 13 do.
    kept, _ = controller.decide(seen, state, steps_left=12)
    moved, _ = controller.decide(seen, state, steps_left=13)
    assert not kept.changed
    assert kept.reason == (
        "kept: worker 3 60 -> 18 and 3 more would save 2 s of the rest of the run "
        "and cost 2 s of compilation"
    )
    assert moved.allocation.sizes == (74, 74, 74, 18)


def test_programs_that_exist_cost_nothing() -> None:
    controller = exact()
    decision, state = controller.start()
    first = decision.allocation
    slow = told_programs(observe(first, (0.001, 0.001, 0.001, 0.004)), seconds=2.0)
    decision, state = controller.decide(slow, state, steps_left=1000)
    back = observe(decision.allocation, (0.001,) * 4)
    decision, state = controller.decide(back, state, steps_left=1)
    assert decision.allocation == first


@pytest.mark.parametrize(
    ("settings", "steps_left"), [({"weigh_compilation": False}, 1), ({}, None)]
)
def test_moves_are_not_weighed(settings, steps_left) -> None:
    controller = exact(**settings)
    decision, state = controller.start()
    seen = observe(decision.allocation, (0.001, 0.001, 0.001, 0.004))
    seen = told_programs(seen, seconds=1e6)
    decision, _ = controller.decide(seen, state, steps_left)
    assert decision.changed


def test_shares_that_stay_are_compiled_at_their_own_sizes() -> None:
    cluster = Cluster.create(3, 250, granule=16)
    for policy in (policies.get("equal"), policies.get("fixed", shares=(0.7, 0.3, 0))):
        cluster = dataclasses.replace(cluster, limits=Limits((0,) * 3, (250,) * 3))
        controller = Controller(policy, cluster)
        decision, state = controller.start()
        sizes = decision.allocation.sizes
        assert sizes in ((84, 83, 83), (175, 75, 0))
        assert decision.allocation.capacities == tuple(max(s, 1) for s in sizes)
        assert controller.allocation_of(sizes) == decision.allocation
        seen = observe(decision.allocation, (0.001, 0.002, 0.003))
        assert not controller.decide(seen, state)[0].changed

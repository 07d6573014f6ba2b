"""Simulated runs: seconds that add up, the real controller, and honest observations."""

import dataclasses
import time

import numpy as np
import pytest

from jdlb.balance import policies
from jdlb.balance.policies.protocol import Policy, equal_targets
from jdlb.balance.simulation.disturbances import (
    Hiccups,
    Hit,
    RandomSlowdowns,
    SquareWave,
)
from jdlb.balance.simulation.fit import fitted_table
from jdlb.balance.simulation.scenario import Change, Network, Noise, Scenario, Worker
from jdlb.balance.simulation.score import (
    ideal_seconds,
    oracle_over_ideal,
    score,
)
from jdlb.balance.simulation.simulator import PROBE_STEPS, SimulatedRun, simulate
from jdlb.balance.simulation.world import World
from jdlb.balance.time_tables import GTX_750, GTX_1070, TESLA_M40, TimeTable
from jdlb.errors import UserError


def affine(*example_seconds: float, fixed: float = 0.0) -> tuple[Worker, ...]:
    return tuple(Worker(TimeTable.affine(fixed, e)) for e in example_seconds)


# Speeds 1, 1/2 and 1/4: balanced at 120, 80 and 40 of 240 but for fixed costs.
def scenario(**changes) -> Scenario:
    fields = {
        "workers": affine(0.001, 0.0015, 0.003),
        "global_batch": 240,
        "rounds": 6,
        "steps": 10,
        "granule": 1,
        "growth": 0.0,
    }
    return Scenario(**{**fields, **changes})


def run(name: str, made: Scenario) -> SimulatedRun:
    def maker(shares):
        return policies.get(name, **({"shares": shares} if name == "fixed" else {}))

    return simulate(World(made), name, maker)


def recording(seen: list, **changes):
    """Equal shares, and everything that is observed."""

    def init(cluster):
        return equal_targets(cluster), equal_targets(cluster)

    def update(observation, state):
        seen.append(observation)
        return state, state

    return lambda shares: Policy("recording", init, update, **changes)


def test_seconds_add_up() -> None:
    network = Network(latency_seconds=0.01)
    made = scenario(network=network, compile_seconds=3.0)
    equal = run("equal", made)
    first, *later = equal.rounds
    assert first.sizes.tolist() == [80, 80, 80]
    assert first.step_seconds == pytest.approx(0.24 + 0.04)
    assert first.seconds == pytest.approx(10 * 0.28 + 3.0)
    assert first.busy_seconds == pytest.approx([0.8, 1.2, 2.4])
    assert first.compilations == 3
    assert [r.seconds for r in later] == pytest.approx([2.8] * 5)
    assert equal.seconds == pytest.approx(6 * 2.8 + 3)
    assert ideal_seconds(equal.world) == pytest.approx(60 * 0.16)


def test_dlb_balances_in_one_round_and_compiles_once_a_capacity() -> None:
    dlb = run("dlb", scenario(compile_seconds=1.0))
    assert dlb.rounds[0].rebalanced
    assert "worker 0 80 -> 120" in dlb.rounds[0].reason
    assert [r.sizes.tolist() for r in dlb.rounds[1:]] == [[120, 80, 40]] * 5
    # Worker 1 keeps its capacity: nothing new for it.
    assert [r.compilations for r in dlb.rounds] == [3, 2, 0, 0, 0, 0]
    assert [r.compile_seconds for r in dlb.rounds] == [1, 1, 0, 0, 0, 0]


def test_the_controller_knows_what_is_left_of_the_run() -> None:
    dear = run("dlb", scenario(rounds=2, compile_seconds=100.0))
    assert not dear.rounds[0].rebalanced
    assert "of compilation" in dear.rounds[0].reason


def test_observations_are_those_of_a_job() -> None:
    seen: list = []
    made = scenario(
        noise=Noise(step=0.2), network=Network(0.01), compile_seconds=2.0, rounds=2
    )
    world = World(made)
    simulate(world, "recording", recording(seen))
    for r, observation in enumerate(seen):
        busy = world.busy(r, np.full(3, 80), None)
        steps = busy.max(axis=1) + 0.04
        # The first step of a new program is not measured.
        busy, steps = (busy[1:], steps[1:]) if r == 0 else (busy, steps)
        assert observation.round == r
        assert observation.sizes == observation.capacities == (80, 80, 80)
        assert observation.measured_steps == (len(steps),) * 3
        assert observation.busy_seconds == pytest.approx(busy.sum(axis=0))
        assert observation.busy_median_seconds == pytest.approx(np.median(busy, axis=0))
        assert observation.wait_seconds == pytest.approx(steps.sum() - busy.sum(axis=0))
    assert seen[0].compile_seconds == (2.0, 2.0, 2.0)
    assert seen[1].compilations == (0, 0, 0)


def test_a_round_of_one_step_of_a_new_program_measures_nothing() -> None:
    seen: list = []
    simulate(World(scenario(steps=1, rounds=2)), "recording", recording(seen))
    assert seen[0].measured_steps == (0, 0, 0)
    assert seen[0].busy_seconds == (0.0, 0.0, 0.0)
    assert seen[1].measured_steps == (1, 1, 1)


def test_a_probe_comes_first_and_is_paid_for() -> None:
    static = run("static", scenario(compile_seconds=1.0))
    first = static.rounds[0]
    assert first.sizes.tolist() == [120, 80, 40]
    assert first.probe_seconds == pytest.approx(PROBE_STEPS * 0.24)
    assert first.seconds == pytest.approx(PROBE_STEPS * 0.24 + 10 * 0.12 + 2.0)
    assert first.compilations == 5
    assert score(static).rounds_to_balance == 0
    assert score(static).rebalances == 0


def test_micro_batches_are_compiled_once_and_paid_whole() -> None:
    seen: list = []
    made = scenario(workers=affine(0.001, 0.001, fixed=0.01), compile_seconds=1.0)
    micro = simulate(World(made), "recording", recording(seen, micro_batch=16))
    for r in micro.rounds:
        units = -(-r.capacities // 16)
        assert np.all(r.capacities % 16 == 0)
        assert r.step_seconds == pytest.approx(units.max() * (0.01 + 0.016))
    assert [r.compilations for r in micro.rounds] == [2, 0, 0, 0, 0, 0]


def test_micro_batches_are_compiled_once_whatever_the_shares() -> None:
    dlb = dataclasses.replace(policies.get("dlb"), micro_batch=8)
    moving = simulate(World(scenario(compile_seconds=1.0)), "dlb", lambda _: dlb)
    assert moving.rounds[1].capacities.tolist() == [120, 80, 40]
    assert [r.compilations for r in moving.rounds] == [3, 0, 0, 0, 0, 0]


def test_a_worker_leaves_and_joins_and_the_batch_stays() -> None:
    changes = (Change(2, 0, False), Change(4, 0, True))
    dlb = run("dlb", scenario(membership=changes, compile_seconds=1.0))
    assert all(r.sizes.sum() == 240 for r in dlb.rounds)
    sizes = [r.sizes.tolist() for r in dlb.rounds]
    assert sizes[:2] == [[80, 80, 80], [120, 80, 40]]
    # Anew, from equal shares of those that are there.
    assert sizes[2:] == [[0, 120, 120], [0, 160, 80], [80, 80, 80], [120, 80, 40]]
    # What stayed, and what came back, still has its programs: worker 2 has 80.
    assert [r.compilations for r in dlb.rounds] == [3, 2, 2, 1, 0, 0]
    assert dlb.rounds[2].busy_seconds[0] == 0


def test_programs_of_workers_that_stay_are_told_to_the_new_controller() -> None:
    """Else it would take an old program for a new one that costs nothing."""
    changes = (Change(1, 0, False), Change(2, 0, True))
    made = scenario(membership=changes, compile_seconds=100.0, rounds=4)
    again = run("dlb", made).rounds[2]
    assert again.sizes.tolist() == [80, 80, 80]
    assert again.compilations == 0
    # 10 steps left could not pay for 100 s.
    assert not again.rebalanced


def test_shares_for_fixed_are_those_of_calm_workers() -> None:
    made = scenario(disturbances=(SquareWave((0,), 3.0, 6),))
    assert run("fixed", made).rounds[0].sizes.tolist() == [120, 80, 40]


def test_every_policy_meets_the_same_world() -> None:
    made = scenario(
        noise=Noise(0.1, 0.1, 0.01), disturbances=(RandomSlowdowns(),), steps=4
    )
    one, other = run("dlb", made), run("dlb", made)
    assert [r.seconds for r in one.rounds] == [r.seconds for r in other.rounds]
    assert run("equal", made).seconds != one.seconds


def test_scores_of_runs_that_can_be_reckoned() -> None:
    made = scenario(rounds=4)
    equal, dlb = score(run("equal", made)), score(run("dlb", made))
    assert equal.time_over_ideal == pytest.approx(2.0)
    assert equal.utilisation == pytest.approx((0.08 + 0.12 + 0.24) / (3 * 0.24))
    assert (equal.rounds_to_balance, equal.rebalances) == (None, 0)
    assert equal.compilations == 3
    assert dlb.time_over_ideal == pytest.approx((0.24 + 3 * 0.12) / (4 * 0.12))
    assert (dlb.rounds_to_balance, dlb.rebalances, dlb.compilations) == (1, 1, 5)
    assert dlb.worst_regression is None
    assert oracle_over_ideal(World(made)) == pytest.approx(1.0)


def test_a_hiccup_that_moved_shares_is_regretted() -> None:
    hit = Hit(2, 0, steps=10, factor=2.0)
    made = scenario(disturbances=(Hiccups((hit,)),), rounds=6)
    dlb, equal = run("dlb", made), run("equal", made)
    # Worker 0 looked half as fast: 80, 107 and 53, of which 107 take 0.16 s, not 0.12.
    assert dlb.rounds[3].sizes.tolist() == [80, 107, 53]
    assert score(dlb).worst_regression == pytest.approx(0.1605 / 0.12 - 1)
    assert score(equal).worst_regression == 0.0


def test_what_else_happens_after_a_hiccup_is_no_regression() -> None:
    """Worker 2 was slow until then: equal shares are as good as they were."""
    wave, hit = SquareWave((2,), 2.0, half_period=3), Hit(2, 0, 10, 2.0)
    made = scenario(disturbances=(wave, Hiccups((hit,))))
    assert score(run("equal", made)).worst_regression == 0.0


def test_a_second_hiccup_does_not_hide_the_first() -> None:
    hits = (Hit(2, 0, 10, 2.0), Hit(3, 0, 10, 2.0))
    dlb = run("dlb", scenario(disturbances=(Hiccups(hits),)))
    assert score(dlb).worst_regression == pytest.approx(0.1605 / 0.12 - 1)


def test_utilisation_is_of_the_workers_that_are_there() -> None:
    made = scenario(workers=affine(0.001, 0.001), membership=(Change(0, 1, False),))
    assert score(run("equal", made)).utilisation == pytest.approx(1.0)


def test_within_five_per_cent_is_five_per_cent() -> None:
    """Shares that are 4.9 and 5.1 % above the best makespan."""
    workers = affine(0.001, 0.001)
    for slower, near in ((1.049, 0), (1.051, None)):
        made = scenario(
            workers=workers, global_batch=2000, disturbances=(), granule=1, rounds=1
        )
        share = slower / 2
        fixed = simulate(
            World(made),
            "fixed",
            lambda _, share=share: policies.get("fixed", shares=(share, 1 - share)),
        )
        assert score(fixed).rounds_to_balance == near


def test_published_gpu_times_under_dlb() -> None:
    workers = tuple(map(Worker, (GTX_1070, GTX_1070, TESLA_M40, GTX_750)))
    made = scenario(workers=workers, global_batch=512, rounds=30)
    dlb = run("dlb", made)
    last = dlb.rounds[-1]
    assert ideal_seconds(dlb.world) / 300 == pytest.approx(0.1851, abs=5e-5)
    assert last.step_seconds <= 1.05 * 0.1851
    assert score(dlb).rounds_to_balance == 2
    assert not dlb.rounds[-2].rebalanced


def test_a_thousand_workers_for_200_rounds_take_less_than_ten_seconds() -> None:
    speeds = [1 + 3 * (w * 619 % 1000) / 999 for w in range(1000)]
    made = Scenario(
        workers=affine(*(5e-3 / s for s in speeds), fixed=0.005),
        global_batch=32_000,
        rounds=200,
        steps=20,
        noise=Noise(0.02, 0.005, 1e-5),
        disturbances=(RandomSlowdowns(0.002, (4, 20), (2, 4)),),
        compile_seconds=2.0,
    )
    start = time.process_time()
    dlb = run("dlb", made)
    seconds = time.process_time() - start
    assert len(dlb.rounds) == 200
    assert seconds < 10


def test_a_line_is_found_again() -> None:
    sizes = np.array([40, 80, 80, 120])
    table = fitted_table("w", sizes.tolist(), (0.01 + 0.002 * sizes).tolist())
    assert table.seconds(100) == pytest.approx(0.21)


def test_relative_errors_count() -> None:
    table = fitted_table("w", [10, 10, 1000, 1000], [0.9, 1.1, 90.0, 110.0])
    assert table.seconds(10) == pytest.approx(0.99, abs=0.01)


@pytest.mark.parametrize(
    ("sizes", "seconds", "said"),
    [
        ((), (), "0 capacity"),
        ((80, 80), (0.1, 0.2), "1 capacity"),
        ((40, 80), (0.2, 0.1), "do not rise"),
    ],
)
def test_too_little_to_fit_a_line_is_refused(sizes, seconds, said) -> None:
    with pytest.raises(UserError, match=said) as error:
        fitted_table("worker 2", sizes, seconds)
    assert "worker 2" in str(error.value)

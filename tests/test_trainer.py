"""The trainer, whole rounds in one process: what is learned does not depend on how."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_training import (
    PARAMS,
    ROOMY,
    SOURCE,
    STEPS,
    TWO_EPOCHS,
    B,
    N,
    W,
    flat,
    loss,
    make,
    restless,
    stubborn,
)

from jdlb.balance import policies
from jdlb.balance.controller import Controller
from jdlb.data.partition import epoch_order
from jdlb.errors import UserError
from jdlb.trainer import PROBE_STEPS


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (1, {}),
        (4, {}),
        (4, {"policy": restless(1)}),
        (4, {"policy": restless(2), "round_steps": 1, **ROOMY}),
        (4, {"policy": restless(3), "round_steps": 2, "run_ahead": 1, **ROOMY}),
        (4, {"policy": policies.get("fixed", shares=(0.625, 0.125, 0.125, 0.125))}),
        (2, {"policy": "static"}),
        (4, {"policy": "dlb", "run_ahead": 9}),
    ],
)
def test_whatever_the_shares_the_parameters_are_those_of_one_device(
    workers: int, options: dict[str, Any]
) -> None:
    with make(workers, **options) as trainer:
        records = [r for _ in range(2) for r in trainer.train_epoch()]
        assert np.linalg.norm(
            flat(trainer.params) - TWO_EPOCHS
        ) < 1e-6 * np.linalg.norm(TWO_EPOCHS)
        for w in range(workers):
            assert np.array_equal(
                flat(trainer._engine.replica(w)), flat(trainer.params)
            )
    for record in records:
        assert sum(record.sizes) == B
    assert sum(record.examples for record in records) == 2 * N
    assert sum(record.steps for record in records) == 2 * STEPS
    if "round_steps" in options and workers == 4:
        assert len({record.sizes for record in records}) > 2


def tell(params: Any, batch: Any) -> tuple[jax.Array, dict]:
    """A loss whose metrics say which examples it saw, and their keys."""
    bits = (jax.vmap(jax.random.bits)(batch["key"]) >> 12).astype(jnp.float32)
    # Sums of one-hots: in the statistics only real rows are left.
    hot = batch["index"][:, None] == jnp.arange(N)[None]
    counts = {f"n{i:02}": hot[:, i] for i in range(N)}
    keys = {f"k{i:02}": jnp.where(hot[:, i], bits, 0) for i in range(N)}
    return loss(params, batch)[0], counts | keys


def test_each_example_once_an_epoch_with_a_key_of_its_own() -> None:
    def epochs(workers: int, policy: Any, seed: int = 0) -> list[dict[str, float]]:
        options: Any = {"loss": tell, "policy": policy, "seed": seed}
        if workers == W:
            options |= ROOMY
        with make(workers, **options) as trainer:
            records = [trainer.train_epoch()[0] for _ in range(2)]
        assert all(record.examples == N for record in records)
        return [{k: round(v * N) for k, v in r.metrics.items()} for r in records]

    one = epochs(1, "equal")
    many = epochs(4, restless(5))
    other = epochs(1, "equal", seed=1)
    for epoch in (*one, *many, *other):
        assert [epoch[f"n{i:02}"] for i in range(N)] == [1] * N
    keys = [[epoch[f"k{i:02}"] for i in range(N)] for epoch in (*one, *other)]
    # On any worker the key is the same; in another epoch or run it is another.
    assert keys[:2] == [[epoch[f"k{i:02}"] for i in range(N)] for epoch in many]
    assert len({key for epoch in keys for key in epoch}) == 4 * N


class RecordingSource:
    """A list that remembers what was read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return SOURCE[index]


def test_examples_are_read_in_the_order_of_the_epoch() -> None:
    source = RecordingSource()
    options: Any = {"policy": restless(7), "round_steps": 1, **ROOMY}
    with make(source=source, **options) as trainer:
        for epoch in range(2):
            source.read.clear()
            trainer.train_epoch()
            assert source.read == epoch_order(0, epoch, N).tolist()


def test_a_round_leaves_out_of_the_meter_what_does_not_count() -> None:
    with make(policy="equal") as trainer:
        first, second = trainer.train_epoch() + trainer.train_epoch()
    # Three steps: the first of a new shape, a full one, a partial one.
    assert first.measured_steps == (1,) * W
    assert second.measured_steps == (2,) * W
    assert all(0 < median < 10 for median in second.busy_median_seconds)
    # One group of four, compiled once, before the first round.
    assert first.compilations == (1, 0, 0, 0)
    assert second.compilations == (0, 0, 0, 0)
    assert second.compile_seconds == (0, 0, 0, 0)


def test_a_probe_changes_nothing_and_decides() -> None:
    shares = (0.625, 0.125, 0.125, 0.125)
    with make(policy=stubborn(shares, probe=True), optimizer=optax.adam(0.1)) as probed:
        (record,) = probed.train_epoch()
        assert record.sizes == (5, 1, 1, 1)
        assert record.round == 0
        with make(optimizer=optax.adam(0.1)) as plain:
            plain.train_epoch()
            expected = flat(plain.params)
        assert np.linalg.norm(flat(probed.params) - expected) < 1e-6
        # More steps than the epoch has full batches: some pass again.
        (times, *_) = probed.measure(PROBE_STEPS)
        assert len(times.busy) == PROBE_STEPS
        assert np.linalg.norm(flat(probed.params) - expected) < 1e-6


def test_static_probes_once() -> None:
    calls: list[tuple[int, int]] = []
    options: Any = {"policy": "static", "on_step": lambda e, s: calls.append((e, s))}
    with make(2, **options) as trainer:
        (first,) = trainer.train_epoch()
        assert len(calls) == PROBE_STEPS + STEPS
        assert calls[-STEPS:] == [(0, 0), (0, 1), (0, 2)]
        (second,) = trainer.train_epoch()
        assert len(calls) == PROBE_STEPS + 2 * STEPS
    assert first.sizes == second.sizes == trainer.allocation.sizes


def test_a_source_without_a_full_batch_trains_all_the_same() -> None:
    with make(policy="static", source=SOURCE[:3]) as trainer:
        (record,) = trainer.train_epoch()
    assert (record.steps, record.examples) == (1, 3)
    assert record.measured_steps == (0,) * W


def test_a_dry_run_decides_and_keeps_the_first_allocation() -> None:
    policy = stubborn((0.625, 0.125, 0.125, 0.125))
    with make(policy=policy, dry_run=True) as trainer:
        records = trainer.train_epoch() + trainer.train_epoch()
    assert [r.sizes for r in records] == [(2, 2, 2, 2)] * 2
    assert records[0].reason.startswith("dry run, kept: shares moved: worker 0 2 -> 5")
    assert not any(r.rebalanced for r in records)


def test_fixed_shares_stay() -> None:
    shares = (0.5, 0.25, 0.125, 0.125)
    with make(policy=policies.get("fixed", shares=shares)) as trainer:
        records = trainer.train_epoch() + trainer.train_epoch()
    assert {r.sizes for r in records} == {(4, 2, 1, 1)}
    assert not any(r.rebalanced for r in records)


def test_rounds_of_some_steps() -> None:
    with make(policy=restless(1), round_steps=2) as trainer:
        rounds = [r for _ in range(2) for r in trainer.rounds()]
    assert [(r.epoch, r.round, r.first_step, r.steps) for r in rounds] == [
        (0, 0, 0, 2),
        (0, 1, 2, 1),
        (1, 2, 0, 2),
        (1, 3, 2, 1),
    ]
    for one, two in itertools.pairwise(rounds):
        assert one.next_sizes == two.sizes
        assert one.rebalanced == (one.sizes != two.sizes)


def test_the_callers_parameters_stay_and_those_that_come_out_are_plain() -> None:
    params = jax.tree.map(jnp.array, PARAMS)
    with make(params=params) as trainer:
        trainer.train_epoch()
        before = flat(trainer.params).copy()
        taken = trainer.params
        trainer.train_epoch()
    assert flat(params).tolist() == [0, 0, 0, 0]
    assert np.array_equal(flat(taken), before)
    assert jax.tree.structure(taken) == jax.tree.structure(PARAMS)
    # A scalar, too: `np.float32` is not what other libraries take for a leaf.
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(taken))


@pytest.mark.parametrize("count", [1, 7, 11, 23])
def test_evaluation_is_exact_whatever_the_shares(count: int) -> None:
    policy = policies.get("fixed", shares=(0.0, 0.625, 0.25, 0.125))
    with make(policy=policy) as trainer:
        trainer.train_epoch()
        examples, means = trainer.evaluate(SOURCE[:count])
        params = trainer.params
        trainer.evaluate(SOURCE)
        programs: Any = trainer._evaluations[loss]._sums
        assert programs._cache_size() == 1
    rows = SOURCE[:count]
    batch = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    losses, metrics = loss(params, batch)
    assert examples == count
    assert means["loss"] == pytest.approx(np.asarray(losses, float).mean(), rel=1e-6)
    absolute = np.asarray(metrics["absolute"], float).mean()
    assert means["absolute"] == pytest.approx(absolute, rel=1e-6)


def test_evaluation_of_nothing() -> None:
    with make(1) as trainer, pytest.raises(UserError, match="nothing to evaluate"):
        trainer.evaluate([])


def test_the_controller_hears_how_many_steps_are_left(monkeypatch) -> None:
    heard: list[int | None] = []
    decide = Controller.decide

    def listening(self, observation, state, steps_left=None):
        heard.append(steps_left)
        return decide(self, observation, state, steps_left)

    monkeypatch.setattr(Controller, "decide", listening)
    with make(policy="static", epochs=2, round_steps=2) as trainer:
        steps = trainer.steps_in_epoch
        trainer.train_epoch()
        trainer.train_epoch()
    ends = [min(first + 2, steps) for first in range(0, steps, 2)]
    expected = [2 * steps]
    expected += [2 * steps - end for end in ends] + [steps - end for end in ends]
    assert heard == expected
    assert heard[-1] == 0
    with make() as trainer:
        trainer.train_epoch()
    assert heard[-1] is None

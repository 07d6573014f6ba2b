"""What a step does when a worker cannot give what it should, or the input is wrong."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from small_cluster import (
    EXAMPLE,
    batch_of,
    engine_of,
    flat,
    fresh_engine,
    local_workers,
    mlp_loss,
    mlp_params,
    reference,
    relative_error,
    take_step,
)

from jdlb.engine.step import StepEngine
from jdlb.errors import UserError


@pytest.mark.parametrize("bad_worker", [0, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(
    bad_worker: int, value: float
) -> None:
    engine = fresh_engine(3, optimizer="adamw")
    sizes, capacities = (3, 3, 2), (8, 8, 8)
    take_step(engine, batch_of(8), sizes, capacities)
    before = jax.tree.map(np.array, engine.state)
    batch = batch_of(8, seed=2)
    batch["x"][sum(sizes[:bad_worker])] = value
    outcome = take_step(engine, batch, sizes, capacities)
    assert not outcome.counted
    assert np.flatnonzero(outcome.statistics.bad).tolist() == [bad_worker]
    assert outcome.failed == ()
    jax.tree.map(np.testing.assert_array_equal, before, engine.state)
    # The next good step counts as if nothing had been.
    assert take_step(engine, batch_of(8), sizes, capacities).counted


def huge_loss(params: Any, batch: Any) -> tuple[jax.Array, dict]:
    return params["w"] * batch["y"], {}


def test_a_sum_that_overflows_though_each_worker_is_finite() -> None:
    params = {"w": np.ones((), np.float32)}
    engine = engine_of(2, loss=huge_loss, params=params)
    batch = batch_of(2)
    batch["y"][:] = 3e38
    outcome = take_step(engine, batch, (1, 1))
    assert not outcome.counted
    assert not outcome.statistics.bad.any()
    assert engine.replica(0) == params == engine.replica(1)


def exhausted(*_: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_a_worker_out_of_memory_halts_all_until_told_otherwise() -> None:
    engine = engine_of(2)
    batch, sizes = batch_of(8), (6, 2)
    take_step(engine, batch, sizes)
    before = flat(engine.replica(0))
    (key,) = [g.key for g in engine._groups if g.workers == (0,)]
    working = engine._programs[key]
    engine._programs[key] = exhausted  # pyright: ignore[reportArgumentType]
    outcome = take_step(engine, batch, sizes)
    assert outcome.failed == (0,)
    assert not outcome.counted
    engine._programs[key] = working
    # A step in flight behind the failure changes nothing, and is no failure itself.
    behind = take_step(engine, batch, sizes)
    assert not behind.counted
    assert behind.failed == ()
    assert np.array_equal(flat(engine.replica(0)), before)
    assert np.array_equal(flat(engine.replica(1)), before)
    engine.set_halted(False)
    assert take_step(engine, batch, sizes).counted
    expected = reference(mlp_loss, mlp_params(), optax.sgd(0.1), [batch, batch])
    assert relative_error(engine.replica(0), expected) < 1e-6


def test_other_errors_of_a_program_are_not_taken_for_memory() -> None:
    def broken(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    engine = engine_of(1)
    engine.prepare((2,))
    engine._programs[engine._groups[0].key] = broken  # pyright: ignore[reportArgumentType]
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        take_step(engine, batch_of(2), (2,))


def test_halted_replicas_change_nothing() -> None:
    engine = fresh_engine(2, optimizer="momentum")
    before = jax.tree.map(np.array, engine.state)
    engine.set_halted(True)
    assert not take_step(engine, batch_of(8), (4, 4), (8, 8)).counted
    engine.set_halted(False)
    jax.tree.map(np.testing.assert_array_equal, before, engine.state)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, b: mlp_loss(p, b)[0].mean(), "must return"),
        (lambda p, b: (mlp_loss(p, b)[0].mean(), {}), "one value an example"),
        (lambda p, b: (mlp_loss(p, b)[0], {"m": 1.0 * p["bias"].sum()}), "'m'"),
        (lambda p, b: (mlp_loss(p, b)[0], p["bias"]), "must be a dict"),
        (lambda p, b: (mlp_loss(p, b)[0], {"loss": b["y"]}), "without the name"),
    ],
)
def test_a_loss_that_is_not_per_example(loss: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        engine_of(1, loss=loss)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["index", "key"])
def test_a_field_whose_name_the_batch_needs(name: str) -> None:
    example = {**EXAMPLE, name: np.zeros((), np.int32)}
    with pytest.raises(UserError, match=f"'{name}': rename it"):
        StepEngine(local_workers(1), mlp_loss, optax.sgd(1.0), mlp_params(), example)

"""The step: the update of one device for any allocation, and what must not disturb it."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_cluster import (
    ADAMW,
    EXAMPLE,
    MODELS,
    OPTIMIZERS,
    batch_of,
    engine_of,
    flat,
    fresh_engine,
    local_workers,
    mlp_loss,
    mlp_params,
    reference,
    relative_error,
    split,
    take_step,
)

from jdlb.engine import programs
from jdlb.engine.layout import layout_of
from jdlb.engine.step import StepEngine


@functools.partial(jax.jit, static_argnums=0)
def gradient_of_one(model: str, x: jax.Array, y: jax.Array) -> Any:
    """The gradient of one example's loss at the first parameters."""
    loss, params = MODELS[model]
    return jax.grad(lambda p: loss(p, {"x": x[None], "y": y[None]})[0][0])(params)


@st.composite
def allocations(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Sizes from zero rows up, at least one in all, in one to three capacities."""
    sizes = draw(st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any))
    ladder = draw(st.sampled_from([(6,), (3, 6), (1, 3, 6)]))
    return sizes, [min(c for c in ladder if c >= size) for size in sizes]


@pytest.mark.parametrize("model", ["mlp", "conv"])
@settings(max_examples=25)
@given(allocation=allocations(), seed=st.integers(0, 99))
def test_any_allocation_gives_the_gradient_of_one_device(
    model: str, allocation: tuple[list[int], list[int]], seed: int
) -> None:
    engine = fresh_engine(3, model)
    sizes, capacities = allocation
    batch = batch_of(sum(sizes), seed)
    engine.prepare(capacities)
    # What `apply` would divide: the sums in the flat vectors themselves.
    inputs = engine.place(split(batch, sizes, capacities, np.nan), 0, 0)
    total = np.zeros(engine.layout.length)
    for group, group_inputs in zip(engine._groups, inputs, strict=True):
        vectors, _ = engine._programs[group.key](
            engine._params_of(group), *group_inputs
        )
        total += np.asarray(vectors, np.float64).sum(axis=0)
    expected = sum(
        flat(gradient_of_one(model, x, y)) for x, y in zip(*batch.values(), strict=True)
    )
    error = total[: engine.layout.parameters] - expected
    assert np.linalg.norm(error) <= 1e-6 * max(np.linalg.norm(expected), 1.0)
    tail = total[engine.layout.parameters :]
    assert engine.layout.statistics(tail).examples == sum(sizes)


SPLITS_OF_8 = [(4, 4), (7, 1), (6, 2), (5, 2, 1), (8, 0), (2, 2, 2, 2), (0, 7, 0, 1)]


@pytest.mark.parametrize("sizes", SPLITS_OF_8)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_several_steps_are_those_of_optax_on_the_whole_batch(
    sizes: Sequence[int], optimizer: str
) -> None:
    engine = fresh_engine(len(sizes), optimizer=optimizer)
    batches = [batch_of(8, seed) for seed in range(5)]
    for batch in batches:
        assert take_step(engine, batch, sizes, [8] * len(sizes)).counted
    expected = reference(mlp_loss, mlp_params(), OPTIMIZERS[optimizer], batches)
    for w in range(len(sizes)):
        assert relative_error(engine.replica(w), expected) < 1e-6


@pytest.mark.parametrize("sizes", [(7, 1), (0, 5, 2, 1)])
def test_in_float64_the_step_is_exact_to_1e_12(sizes: Sequence[int]) -> None:
    with jax.enable_x64(True):
        example = {name: x.astype(np.float64) for name, x in EXAMPLE.items()}
        optimizer = optax.sgd(0.1, momentum=0.9)
        params = mlp_params(np.float64)
        engine = StepEngine(
            local_workers(len(sizes)), mlp_loss, optimizer, params, example
        )
        batches = [batch_of(8, seed, np.float64) for seed in range(3)]
        for batch in batches:
            take_step(engine, batch, sizes, (8, 8, 4, 4)[: len(sizes)])
        expected = reference(mlp_loss, params, optimizer, batches)
        assert relative_error(engine.replica(0), expected) < 1e-12


def test_shares_may_change_between_any_two_steps() -> None:
    engine = fresh_engine(optimizer="adamw")
    batches = [batch_of(8, seed) for seed in range(4)]
    shares = [(2, 2, 2, 2), (5, 3, 0, 0), (1, 1, 1, 5), (0, 8, 0, 0)]
    for batch, sizes in zip(batches, shares, strict=True):
        take_step(engine, batch, sizes, [2 if size < 3 else 8 for size in sizes])
    expected = reference(mlp_loss, mlp_params(), ADAMW, batches)
    assert relative_error(engine.replica(3), expected) < 1e-6


def test_statistics_are_sums_over_the_global_batch() -> None:
    batch = batch_of(8)
    outcome = take_step(fresh_engine(3), batch, (5, 2, 1), (8, 8, 8))
    losses, metrics = mlp_loss(mlp_params(), batch)
    assert outcome.statistics.examples == 8
    assert outcome.statistics.loss_sum == pytest.approx(float(losses.sum()), rel=1e-6)
    assert outcome.statistics.metric_sums.tolist() == [int(metrics["above"].sum())]


def test_a_mean_of_worker_means_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: every worker sends its mean, and the means are averaged."""
    honest = programs.compute

    def mean_of_means(loss: Any, layout: Any, *arguments: Any) -> Any:
        vector, marker = honest(loss, layout, *arguments)
        gradient = vector[:, : layout.parameters]
        mean = gradient / jnp.maximum(marker[:, None], 1)
        weighted = mean * 8 / layout.workers
        return jnp.concatenate(
            [weighted, vector[:, layout.parameters :]], axis=1
        ), marker

    monkeypatch.setattr(programs, "compute", mean_of_means)
    batch = batch_of(8)
    expected = reference(mlp_loss, mlp_params(), optax.sgd(0.1), [batch])
    equal, unequal = engine_of(2), engine_of(2)
    take_step(equal, batch, (4, 4))
    take_step(unequal, batch, (7, 1))
    assert relative_error(equal.replica(0), expected) < 1e-6
    assert relative_error(unequal.replica(0), expected) > 1e-3


PADDED = ((3, 5, 0), (4, 8, 4))


def update_with(padding: float) -> np.ndarray:
    engine = fresh_engine(3)
    outcome = take_step(engine, batch_of(8), *PADDED, padding)
    assert outcome.counted
    return flat(engine.replica(0))


@pytest.mark.parametrize("padding", [1e6, 1e30, np.nan, np.inf])
def test_what_padded_rows_hold_does_not_move_a_bit(padding: float) -> None:
    assert np.array_equal(update_with(padding), update_with(0.0))


def test_an_input_that_is_not_selected_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutant: padding reaches the model, and only the loss is selected."""

    def dirty_batch(fields: Any, mask: Any, index: Any, seed_epoch: Any) -> dict:
        return {**fields, "index": index}

    monkeypatch.setattr(programs, "clean_batch", dirty_batch)
    engine = engine_of(3)
    assert not take_step(engine, batch_of(8), *PADDED, np.nan).counted


def test_a_product_with_the_mask_would_be_seen() -> None:
    """Operation by operation: XLA may turn such a product into a selection."""
    layout = layout_of(mlp_params(), ("m",), 1)
    losses, mask = jnp.array([1.0, jnp.nan, 2.0, jnp.inf]), jnp.arange(4) % 2 == 0
    with jax.disable_jit():
        sums = programs.masked_sums(layout, losses, {"m": losses}, mask)
        mutant = (losses * mask).sum()
    assert [float(x.sum()) for x in sums] == [3, 3]
    assert jnp.isnan(mutant)


def test_the_loss_is_selected_not_multiplied() -> None:
    """A model may give NaN on padding, whatever the padding is."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict]:
        losses, metrics = mlp_loss(params, batch)
        # Rows 1 and later of a worker with one real row: nothing but padding.
        row = jnp.arange(len(losses))
        return losses + jnp.where((batch["index"] == 7) & (row > 0), jnp.nan, 0), {
            name: jnp.where((batch["index"] == 7) & (row > 0), jnp.nan, x)
            for name, x in metrics.items()
        }

    engine = engine_of(2, loss=loss)
    assert take_step(engine, batch_of(8), (7, 1), (8, 4)).counted
    expected = reference(mlp_loss, mlp_params(), optax.sgd(0.1), [batch_of(8)])
    assert relative_error(engine.replica(1), expected) < 1e-6


def test_a_last_partial_batch_smaller_than_the_workers() -> None:
    engine = fresh_engine(4)
    batch = batch_of(2)
    outcome = take_step(engine, batch, (1, 1, 0, 0), (3, 3, 3, 3), np.nan)
    assert outcome.counted
    expected = reference(mlp_loss, mlp_params(), optax.sgd(0.1), [batch])
    for w in range(4):
        assert relative_error(engine.replica(w), expected) < 1e-6


@pytest.mark.parametrize(
    ("sizes", "capacities"), [((3, 5), (4, 8)), ((8, 0), (8, 4)), ((1, 7), (8, 8))]
)
def test_a_model_without_a_gradient_at_zero(
    sizes: Sequence[int], capacities: Sequence[int]
) -> None:
    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict]:
        h = batch["x"] * params["scale"][None]
        unit = h / jnp.linalg.norm(h, axis=1, keepdims=True)
        return (unit.sum(axis=1) - batch["y"]) ** 2, {}

    params = {"scale": np.array([1.0, 2.0, 0.5], np.float32)}
    engine = engine_of(2, loss=loss, params=params)
    batch = batch_of(8)
    assert take_step(engine, batch, sizes, capacities).counted
    expected = reference(loss, params, optax.sgd(0.1), [batch])
    assert relative_error(engine.replica(0), expected) < 1e-6


def test_replicas_hold_the_same_bits_after_steps_on_different_data() -> None:
    engine = fresh_engine(4, optimizer="adamw")
    random = np.random.default_rng(0)
    for seed in range(6):
        sizes = random.multinomial(8, [0.4, 0.3, 0.2, 0.1]).tolist()
        take_step(engine, batch_of(8, seed), sizes, [8] * 4)
    first = flat(engine.replica(0))
    assert not np.array_equal(first, flat(mlp_params()))
    for w in range(1, 4):
        assert np.array_equal(flat(engine.replica(w)), first)


def test_handles_can_be_waited_for_after_later_steps() -> None:
    engine = fresh_engine(2)
    engine.prepare((4, 4))
    rows = split(batch_of(8), (4, 4), (4, 4))
    handles = [engine.step(engine.place(rows, 0, 0)) for _ in range(5)]
    for handle in handles:
        for array in (*handle.contributed, *handle.reduced, handle.summary):
            array.block_until_ready()
        assert len(handle.contributed) == len(handle.reduced) == 2
        assert engine.outcome(handle).counted


def test_the_callers_parameters_are_not_deleted() -> None:
    params = jax.tree.map(jnp.array, mlp_params())
    engine = engine_of(1, params=params)
    take_step(engine, batch_of(2), (2,))
    assert np.array_equal(flat(params), flat(mlp_params()))


def test_keys_follow_seed_epoch_and_index_not_the_worker() -> None:
    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict]:
        drawn = jax.vmap(jax.random.normal)(batch["key"])
        return params["w"] * batch["y"], {"drawn": drawn}

    params = {"w": np.ones((), np.float32)}
    engine = engine_of(2, loss=loss, params=params)
    engine.prepare((1, 2))

    def drawn(worker: int, seed: int, epoch: int, index: int) -> float:
        sizes = [0, 0]
        sizes[worker] = 1
        rows = split(batch_of(1), sizes, (1, 2))
        rows[worker].index[0] = index
        inputs = engine.place(rows, seed, epoch)
        return float(engine.outcome(engine.step(inputs)).statistics.metric_sums[0])

    assert drawn(0, 1, 2, 3) == drawn(1, 1, 2, 3)
    values = [drawn(0, *at) for at in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)]]
    assert len(set(values)) == 4


def test_shapes_are_checked_while_tests_run() -> None:
    """Else the import hook has come too late, and all annotations are for show."""
    layout = fresh_engine(2).layout
    with pytest.raises(TypeError, match="Type-check"):
        programs.masked_sums(layout, jnp.zeros(3), {}, jnp.zeros(4, bool))

"""The step: the update of one device for any allocation, and what must not disturb it."""

import functools
import gc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend import backend
from jax.sharding import NamedSharding
from small_cluster import (
    EXAMPLE,
    WIDTH,
    batch_of,
    flat,
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
from jdlb.engine.mesh import SPLIT
from jdlb.engine.step import StepEngine
from jdlb.errors import UserError

W = 4
ADAMW = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(optax.cosine_decay_schedule(0.1, 6), weight_decay=0.01),
)


def engine_of(
    workers: int = W,
    loss: Any = mlp_loss,
    optimizer: optax.GradientTransformation | None = None,
    params: Any = None,
    **options: Any,
) -> StepEngine:
    return StepEngine(
        local_workers(workers),
        loss,
        optimizer or optax.sgd(0.1),
        mlp_params() if params is None else params,
        EXAMPLE,
        **options,
    )


def conv_loss(params: Any, batch: Any) -> tuple[jax.Array, dict]:
    x = batch["x"].reshape(-1, 1, WIDTH)
    x = jnp.tanh(lax.conv_general_dilated(x, params["kernel"], (1,), "SAME"))
    return (x.sum(axis=(1, 2)) - batch["y"]) ** 2, {}


def conv_params() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {"kernel": random.normal(size=(4, 1, 3)).astype(np.float32)}


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


OPTIMIZERS = {"sgd": optax.sgd(0.1), "momentum": optax.sgd(0.1, 0.9), "adamw": ADAMW}
MODELS = {"mlp": (mlp_loss, mlp_params()), "conv": (conv_loss, conv_params())}


@functools.cache
def _programs(workers: int, model: str, optimizer: str) -> tuple[StepEngine, Any]:
    loss, params = MODELS[model]
    engine = engine_of(workers, loss, OPTIMIZERS[optimizer], params)
    return engine, jax.tree.map(np.array, engine.state)


def fresh_engine(
    workers: int = W, model: str = "mlp", optimizer: str = "sgd"
) -> StepEngine:
    """An engine at its first state, with the programs that earlier tests compiled."""
    engine, start = _programs(workers, model, optimizer)
    sharding = NamedSharding(engine.workers.local_mesh, SPLIT)
    engine.state = jax.tree.map(lambda x: jax.device_put(x.copy(), sharding), start)
    return engine


@pytest.mark.parametrize("model", ["mlp", "conv"])
@settings(max_examples=25, deadline=None)
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


def test_compute_is_traced_once_a_capacity_and_group_size() -> None:
    traces = []

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict]:
        traces.append(batch["y"].shape[0])
        return mlp_loss(params, batch)

    engine = engine_of(4, loss=loss)
    traces.clear()
    made = [engine.prepare(c) for c in [(4, 4, 2, 2), (2, 2, 4, 4), (4, 2, 4, 2)]]
    # Two shapes in groups of two: two traces; new device sets compile, nothing more.
    assert sorted(traces) == [2, 4]
    assert [[(c.workers, c.capacity) for c in cs] for cs in made] == [
        [((2, 3), 2), ((0, 1), 4)],
        [((0, 1), 2), ((2, 3), 4)],
        [((1, 3), 2), ((0, 2), 4)],
    ]
    assert all(c.seconds > 0 for cs in made for c in cs)
    assert engine.prepare((4, 4, 2, 2)) == []
    assert sorted(traces) == [2, 4]
    # A group of another size is another program.
    engine.prepare((4, 4, 4, 2))
    assert sorted(traces) == [2, 2, 4, 4]


def test_a_share_that_stays_in_its_bucket_needs_nothing_new() -> None:
    engine = fresh_engine(2)
    engine.prepare((4, 4))
    for sizes in [(4, 4), (3, 4), (0, 1), (1, 4)]:
        assert engine.prepare((4, 4)) == []
        assert take_step(engine, batch_of(sum(sizes)), sizes, (4, 4)).counted


class Compilations:
    """How often XLA has compiled anything in this process."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Any:
    listener = Compilations()
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield listener
    jax.monitoring.unregister_event_duration_listener(listener)


def test_300_rebalances_compile_what_they_must_and_keep_a_bounded_table(
    compilations: Compilations,
) -> None:
    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict]:
        traces.append(batch["y"].shape)
        return params["w"] * batch["y"], {}

    traces = []
    params = {"w": np.ones((), np.float32)}
    engine = engine_of(3, loss=loss, params=params, max_programs=8)
    client = backend.get_backend()
    random = np.random.default_rng(0)
    take_step(engine, batch_of(3), (1, 1, 1))
    begin, alive = compilations.count, len(client.live_executables())
    traces.clear()
    made = 0
    capacities = [2, 2, 2]
    for _ in range(300):
        # Now and then another bucket: what is in the table is compiled only once.
        if random.random() < 0.2:
            capacities[random.integers(3)] = int(random.integers(2, 4))
        made += len(engine.prepare(capacities))
        rows = split(batch_of(3), (1, 1, 1), capacities)
        outcome = engine.outcome(engine.step(engine.place(rows, 0, 0)))
        assert outcome.counted
        assert len(engine._programs) <= 8
    # More than the table holds, so that some were dropped; and really let go of.
    assert made > 8
    gc.collect()
    assert len(client.live_executables()) <= alive + 8
    # Only `compute`, and only as often as said: `reduce` and `apply` never again, and
    # nothing hidden (a transfer or a regrouping that compiles).
    assert compilations.count - begin == made
    # Two capacities, in groups of one, two and three.
    assert len(traces) <= 6


def test_the_program_used_last_longest_ago_is_dropped() -> None:
    engine = engine_of(1, max_programs=2)
    for capacity in (1, 2):
        engine.prepare((capacity,))
    engine.prepare((1,))
    engine.prepare((3,))
    assert engine.prepare((1,)) == []
    assert len(engine.prepare((2,))) == 1
    # Never fewer than one allocation needs.
    wide = engine_of(4, max_programs=2)
    assert len(wide.prepare((1, 2, 3, 4))) == 4
    assert take_step(wide, batch_of(10), (1, 2, 3, 4)).counted


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


def test_shapes_are_checked_while_tests_run() -> None:
    """Else the import hook has come too late, and all annotations are for show."""
    layout = fresh_engine(2).layout
    with pytest.raises(TypeError, match="Type-check"):
        programs.masked_sums(layout, jnp.zeros(3), {}, jnp.zeros(4, bool))

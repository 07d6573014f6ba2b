"""Traces and compilations of `compute`: as few as there must be, and let go of."""

import gc
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend import backend
from small_cluster import batch_of, engine_of, fresh_engine, mlp_loss, split, take_step


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


@pytest.mark.slow
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

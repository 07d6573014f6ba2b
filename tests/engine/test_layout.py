"""The flat vector: what goes in comes out, whatever the tree."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_cluster import mlp_params

from jdlb.engine.layout import Statistics, all_finite, layout_of
from jdlb.errors import UserError


def statistics(workers: int, metrics: int) -> Statistics:
    return Statistics(
        np.array(2.5),
        np.array(7.0),
        np.arange(metrics) + 10.0,
        np.eye(workers)[0],
        np.eye(workers)[workers - 1],
    )


shapes = st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4)


@settings(max_examples=8)
@given(shapes=shapes, workers=st.integers(1, 5), metrics=st.integers(0, 3))
def test_gradient_and_statistics_come_back(
    shapes: list[list[int]], workers: int, metrics: int
) -> None:
    random = np.random.default_rng(0)
    tree = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    names = tuple("abc"[:metrics])
    layout = layout_of(tree, names, workers)
    sent = statistics(workers, metrics)
    flat = layout.pack(tree, sent)
    assert flat.shape == (layout.length,)
    assert layout.length == layout.parameters + 2 + metrics + 2 * workers
    jax.tree.map(
        np.testing.assert_array_equal,
        layout.gradient(flat[: layout.parameters]),
        tree,
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        layout.statistics(flat[layout.parameters :]),
        sent,
    )


def test_each_leaf_keeps_its_own_type() -> None:
    tree = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones((), jnp.float32)}
    layout = layout_of(tree, (), 1)
    assert layout.dtype == np.float32
    gradient = layout.gradient(jnp.arange(3, dtype=jnp.float32))
    assert gradient["a"].dtype == jnp.bfloat16
    assert gradient["b"].dtype == jnp.float32


def test_sums_are_as_wide_as_the_widest_parameter() -> None:
    tree = {"a": np.ones(2), "b": np.ones(1, np.float32)}
    assert layout_of(tree, (), 1).dtype == np.float32
    with jax.enable_x64(True):
        assert layout_of(tree, (), 1).dtype == np.float64


@pytest.mark.parametrize("worker", range(3))
def test_a_failure_is_one_bit_and_nothing_else(worker: int) -> None:
    layout = layout_of(mlp_params(), ("m",), 3)
    flat = layout.failure(worker)
    assert flat.sum() == 1
    told = layout.statistics(flat[layout.parameters :])
    assert np.flatnonzero(told.failed).tolist() == [worker]
    assert not told.bad.any()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "the parameters are empty"),
        ({"a": {"n": np.zeros(2, np.int32)}}, r"\['a'\]\['n'\] has dtype int32"),
        ({"a": np.zeros(2, bool)}, "has dtype bool"),
        ({"a": 0.5}, r"\['a'\] is the float 0.5: make it an array"),
    ],
)
def test_parameters_that_cannot_be_trained(params: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        layout_of(params, (), 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_all_finite(value: float) -> None:
    assert all_finite(jnp.zeros(3))
    assert not all_finite(jnp.array([0.0, value, 0.0]))

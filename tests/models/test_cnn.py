"""The small network: its size, and a pooling that is what it says."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdlb.models.cnn import Cnn, max_pool_2x2


def test_the_number_of_parameters() -> None:
    shapes = jax.eval_shape(
        Cnn().init, jax.random.key(0), jnp.zeros((1, 28, 28, 1), jnp.float32)
    )
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 1_199_882


def test_examples_do_not_touch_each_other() -> None:
    model = Cnn(classes=3)
    x = jax.random.normal(jax.random.key(1), (3, 8, 9, 2))
    params = model.init(jax.random.key(0), x)
    apply: Callable[..., jax.Array] = jax.jit(model.apply)
    together = apply(params, x)
    assert together.shape == (3, 3)
    disturbed = apply(params, x.at[1].set(1e6))
    np.testing.assert_array_equal(together[0], disturbed[0])
    np.testing.assert_array_equal(together[2], disturbed[2])


@settings(max_examples=10)
@given(h=st.integers(2, 5), w=st.integers(2, 5))
def test_pooling_is_the_maximum_of_each_window(h: int, w: int) -> None:
    x = np.random.default_rng(0).normal(size=(2, h, w, 3)).astype(np.float32)
    expected = np.stack(
        [
            [x[:, i : i + 2, j : j + 2].max(axis=(1, 2)) for j in range(0, w - 1, 2)]
            for i in range(0, h - 1, 2)
        ]
    )
    expected = np.moveaxis(expected, 2, 0)
    np.testing.assert_array_equal(max_pool_2x2(jnp.array(x)), expected)


def test_the_gradient_of_a_window_goes_to_its_maximum() -> None:
    x = jnp.arange(4.0).reshape(1, 2, 2, 1)
    gradient = jax.grad(lambda x: max_pool_2x2(x).sum())(x)
    assert gradient.ravel().tolist() == pytest.approx([0, 0, 0, 1])

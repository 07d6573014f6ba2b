"""Losses: one value an example, and the right one."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdlb.models.losses import softmax_cross_entropy


def test_cross_entropy_by_hand() -> None:
    logits = np.array([[0.0, 0.0], [np.log(3.0), 0.0], [-1e4, 1e4]], np.float32)
    labels = np.array([1, 0, 1], np.int32)
    losses, metrics = softmax_cross_entropy(jnp.array(logits), jnp.array(labels))
    assert losses.tolist() == pytest.approx([np.log(2), np.log(4 / 3), 0.0], rel=1e-6)
    # A tie goes to the lower class.
    assert metrics["accuracy"].tolist() == [False, True, True]


def test_labels_must_be_whole_numbers_one_an_example() -> None:
    with pytest.raises(TypeError, match="Type-check"):
        softmax_cross_entropy(jnp.zeros((3, 2)), jnp.zeros(3))
    with pytest.raises(TypeError, match="Type-check"):
        softmax_cross_entropy(jnp.zeros((3, 2)), jnp.zeros(2, jnp.int32))

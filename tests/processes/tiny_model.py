"""A small network, its data, and the plain one-device loop that it must agree with.

Imported by the tests and by the program that they start in every process.
"""

from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from jdlb.data.partition import epoch_order

INPUTS, HIDDEN, CLASSES = 6, 16, 3
# Four full batches an epoch, and a last one of as many rows as the most workers here.
EXAMPLES, GLOBAL_BATCH = 100, 24
SEED = 3


def make_examples(count: int = EXAMPLES) -> list[dict[str, np.ndarray]]:
    """Random inputs with labels that a network can learn; the first ones stay."""
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(200, INPUTS)).astype(np.float32)
    labels = (inputs @ rng.normal(size=(INPUTS, CLASSES))).argmax(axis=1)
    return [
        {"x": inputs[i], "label": np.asarray(labels[i], np.int32)} for i in range(count)
    ]


def make_batch(count: int = EXAMPLES) -> dict[str, Array]:
    """The first examples as one batch."""
    examples = make_examples(count)
    return {
        "x": jnp.asarray(np.stack([e["x"] for e in examples])),
        "label": jnp.asarray(np.stack([e["label"] for e in examples])),
        "index": jnp.arange(count, dtype=jnp.int32),
    }


def make_params(hidden: int = HIDDEN) -> PyTree:
    """The first parameters, from NumPy: the same on every process."""
    rng = np.random.default_rng(2)
    shapes = {"hidden": (INPUTS, hidden), "out": (hidden, CLASSES)}
    return {
        name: {
            "kernel": rng.normal(size=shape, scale=0.5).astype(np.float32),
            "bias": np.zeros(shape[1], np.float32),
        }
        for name, shape in shapes.items()
    }


def loss(params: PyTree, batch: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Cross-entropy a row; as metrics also what tells which rows took part.

    Sums of the index and of its square over one global batch are exact in float32.
    """
    hidden = jnp.tanh(_dense(params["hidden"], batch["x"]))
    logits = _dense(params["out"], hidden)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {
        "accuracy": logits.argmax(axis=1) == batch["label"],
        "index": batch["index"],
        "square": batch["index"] ** 2,
    }


def _dense(layer: Mapping[str, Array], x: Array) -> Array:
    return jnp.dot(x, layer["kernel"]) + layer["bias"][None]


def make_optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))


def train_alone(epochs: int, skipped: Collection[tuple[int, int]] = ()) -> PyTree:
    """One device, whole batches, mean loss: what training without jdlb gives.

    `skipped` are (epoch, step) without an update.
    """
    optimizer, everything = make_optimizer(), make_batch()

    @jax.jit
    def update(params: PyTree, state: PyTree, rows: Array) -> tuple[PyTree, PyTree]:
        batch = {name: field[rows] for name, field in everything.items()}
        gradient = jax.grad(lambda p: loss(p, batch)[0].mean())(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = make_params()
    state = optimizer.init(params)
    for epoch in range(epochs):
        order = epoch_order(SEED, epoch, EXAMPLES).astype(np.int32)
        for step, first in enumerate(range(0, EXAMPLES, GLOBAL_BATCH)):
            if (epoch, step) not in skipped:
                rows = order[first : first + GLOBAL_BATCH]
                params, state = update(params, state, rows)
    return jax.device_get(params)


def flatten(params: PyTree) -> np.ndarray:
    """All parameters as one float64 vector."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(params)]
    return np.concatenate(leaves)

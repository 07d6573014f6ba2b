"""Small models, batches and workers that the engine's and the trainer's tests share.

`reference` is what everything is compared with: one device, the whole batch, plain JAX
and optax, none of the project's code.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdlb.engine.mesh import Workers, order_workers
from jdlb.engine.step import StepEngine, StepOutcome

WIDTH = 3
EXAMPLE = {"x": np.zeros(WIDTH, np.float32), "y": np.zeros((), np.float32)}


@dataclasses.dataclass(frozen=True)
class Rows:
    """One worker's padded rows."""

    fields: Mapping[str, np.ndarray]
    mask: np.ndarray
    index: np.ndarray


def local_workers(count: int) -> Workers:
    """The first emulated devices as one process's workers."""
    return order_workers(jax.devices()[:count], 0)


def mlp_params(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "hidden": random.normal(size=(WIDTH, 5)).astype(dtype),
        "bias": random.normal(size=5).astype(dtype),
        "out": random.normal(size=5).astype(dtype),
    }


def mlp_loss(params: Any, batch: Mapping[str, Any]) -> tuple[jax.Array, dict]:
    """Squared error of two layers, with one counted metric."""
    hidden = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"][None])
    error = hidden @ params["out"] - batch["y"]
    return error**2, {"above": error > 0}


def batch_of(
    size: int, seed: int = 1, dtype: Any = np.float32
) -> dict[str, np.ndarray]:
    """A global batch: fields [size, ...]."""
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(size, WIDTH)).astype(dtype),
        "y": random.normal(size=size).astype(dtype),
    }


def split(
    batch: Mapping[str, np.ndarray],
    sizes: Sequence[int],
    capacities: Sequence[int],
    padding: float = 0.0,
) -> list[Rows]:
    """The rows of every worker, in order, padded with one value."""
    rows, start = [], 0
    for size, capacity in zip(sizes, capacities, strict=True):
        fields = {}
        for name, x in batch.items():
            fields[name] = np.full((capacity, *x.shape[1:]), padding, x.dtype)
            fields[name][:size] = x[start : start + size]
        index = np.zeros(capacity, np.int32)
        index[:size] = np.arange(start, start + size)
        rows.append(Rows(fields, np.arange(capacity) < size, index))
        start += size
    return rows


def take_step(
    engine: StepEngine,
    batch: Mapping[str, np.ndarray],
    sizes: Sequence[int],
    capacities: Sequence[int] | None = None,
    padding: float = 0.0,
) -> StepOutcome:
    """One whole step under an allocation."""
    capacities = capacities or [max(size, 1) for size in sizes]
    engine.prepare(capacities)
    rows = split(batch, sizes, capacities, padding)
    return engine.outcome(engine.step(engine.place(rows, 0, 0)))


def reference(
    loss: Any, params: Any, optimizer: Any, batches: Sequence[Mapping[str, Any]]
) -> Any:
    """Parameters after a step on each whole batch, on one device."""

    def mean(params: Any, batch: Any) -> jax.Array:
        return loss(params, batch)[0].mean()

    state = optimizer.init(params)
    gradient = jax.jit(jax.grad(mean))
    for batch in batches:
        updates, state = optimizer.update(gradient(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(np.asarray, params)


def flat(tree: Any) -> np.ndarray:
    """All leaves as one float64 vector."""
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


def relative_error(tree: Any, expected: Any) -> float:
    """Norm of the difference over the norm of what was expected."""
    difference = flat(tree) - flat(expected)
    return float(np.linalg.norm(difference) / np.linalg.norm(flat(expected)))

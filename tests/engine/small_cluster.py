"""Small models, batches and workers that the engine's and the trainer's tests share.

`reference` is what everything is compared with: one device, the whole batch, plain JAX
and optax, none of the project's code.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding

from jdlb.engine.mesh import SPLIT, Workers, order_workers
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


ADAMW = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(optax.cosine_decay_schedule(0.1, 6), weight_decay=0.01),
)


def engine_of(
    workers: int = 4,
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


OPTIMIZERS = {"sgd": optax.sgd(0.1), "momentum": optax.sgd(0.1, 0.9), "adamw": ADAMW}
MODELS = {"mlp": (mlp_loss, mlp_params()), "conv": (conv_loss, conv_params())}


@functools.cache
def _programs(workers: int, model: str, optimizer: str) -> tuple[StepEngine, Any]:
    loss, params = MODELS[model]
    engine = engine_of(workers, loss, OPTIMIZERS[optimizer], params)
    return engine, jax.tree.map(np.array, engine.state)


def fresh_engine(
    workers: int = 4, model: str = "mlp", optimizer: str = "sgd"
) -> StepEngine:
    """An engine at its first state, with the programs that earlier tests compiled."""
    engine, start = _programs(workers, model, optimizer)
    sharding = NamedSharding(engine.workers.local_mesh, SPLIT)
    engine.state = jax.tree.map(lambda x: jax.device_put(x.copy(), sharding), start)
    return engine

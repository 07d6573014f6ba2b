"""A small training run and policies of all tempers, for the tests of the trainer.

`plain_jax` is what everything is compared with: none of the project's code but the
order of an epoch.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdlb.balance.ladder import Ladder, Limits
from jdlb.balance.policies.protocol import (
    AnyPolicy,
    Cluster,
    Observation,
    Policy,
    equal_targets,
)
from jdlb.data.partition import epoch_order
from jdlb.engine.mesh import order_workers
from jdlb.trainer import Trainer

N, B, W = 23, 8, 4
STEPS = 3
RANDOM = np.random.default_rng(0)
SOURCE = [
    {"x": x, "y": np.float32(x @ [1.0, -2.0, 0.5])}
    for x in RANDOM.normal(size=(N, 3)).astype(np.float32)
]
PARAMS = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
MOMENTUM = optax.sgd(0.05, momentum=0.9)


def loss(params: Any, batch: Any) -> tuple[jax.Array, dict]:
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return error**2, {"absolute": jnp.abs(error)}


def restless(seed: int) -> AnyPolicy:
    """Other shares every round, drawn anew: what no honest policy would do."""

    def draw(cluster: Cluster, round: int) -> np.ndarray:
        random = np.random.default_rng((seed, round))
        return random.dirichlet(np.ones(cluster.workers)) * cluster.global_batch

    def init(cluster: Cluster) -> tuple[np.ndarray, Cluster]:
        return draw(cluster, 0), cluster

    def update(seen: Observation, state: Cluster) -> tuple[np.ndarray, Cluster]:
        return draw(state, seen.round + 1), state

    return Policy(f"restless-{seed}", init, update)


def stubborn(
    shares: Sequence[float],
    first: Sequence[float] | None = None,
    probe: bool = False,
) -> AnyPolicy:
    """Equal at first unless other shares are given, then always these shares."""

    def init(cluster: Cluster) -> tuple[np.ndarray, int]:
        total = cluster.global_batch
        return np.array(first) * total if first else equal_targets(cluster), total

    def update(seen: Observation, total: int) -> tuple[np.ndarray, int]:
        return np.array(shares) * total, total

    return Policy("stubborn", init, update, probe)


def roomy(workers: int = W) -> Cluster:
    """One capacity for all: shares move freely, and one program serves them."""
    return Cluster(workers, B, Ladder(B, top=B), Limits((0,) * workers, (B,) * workers))


def make(workers: int = W, **options: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "loss": loss,
        "params": PARAMS,
        "optimizer": MOMENTUM,
        "source": SOURCE,
        "global_batch": B,
        "policy": "equal",
        "workers": order_workers(jax.devices()[:workers], 0),
        **options,
    }
    return Trainer(**arguments)


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def plain_jax(epochs: int, optimizer: Any = MOMENTUM, seed: int = 0) -> np.ndarray:
    """The same training on one device, in a loop of its own."""
    params, state = PARAMS, optimizer.init(PARAMS)
    mean = jax.jit(jax.grad(lambda p, b: loss(p, b)[0].mean()))
    for epoch in range(epochs):
        order = epoch_order(seed, epoch, N)
        for at in range(0, N, B):
            rows = [SOURCE[i] for i in order[at : at + B]]
            batch = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
            updates, state = optimizer.update(mean(params, batch), state, params)
            params = optax.apply_updates(params, updates)
    return flat(params)


TWO_EPOCHS = plain_jax(2)
ROOMY: dict[str, Any] = {"cluster": roomy(), "aligned": False}


def close_to(params: Any, expected: np.ndarray) -> bool:
    """But for the order of the sums."""
    error = np.linalg.norm(flat(params) - expected)
    return bool(error < 1e-6 * np.linalg.norm(expected))

"""Evaluation: exact means whatever the number of examples and the shares."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from small_cluster import Rows, batch_of, local_workers, mlp_loss, mlp_params, split

from jdlb.engine.evaluation import Evaluation
from jdlb.engine.exchange import Exchange
from jdlb.engine.mesh import SPLIT, Workers
from jdlb.errors import UserError

CAPACITY = 4
traces = []


def loss(params: Any, batch: Any) -> tuple[jax.Array, dict]:
    traces.append(batch["y"].shape)
    losses, metrics = mlp_loss(params, batch)
    return losses, {**metrics, "thousands": batch["index"] * 0 + 1_000_003}


def setup(count: int) -> tuple[Workers, Evaluation, Any]:
    workers = local_workers(count)
    sharding = NamedSharding(workers.local_mesh, SPLIT)
    params = jax.tree.map(
        lambda x: jax.device_put(np.stack([x] * count), sharding), mlp_params()
    )
    return workers, Evaluation(workers, loss, Exchange(workers)), params


CLUSTERS = {count: setup(count) for count in (1, 2, 3, 4)}


def batches_of(
    batch: dict[str, np.ndarray], shares: Sequence[int], padding: float
) -> Iterator[list[Rows]]:
    """Each worker's share of the examples, in as many batches as the largest takes."""
    rows = split(batch, shares, [-(-max(shares) // CAPACITY) * CAPACITY] * len(shares))
    for mine in rows:
        for x in mine.fields.values():
            x[~mine.mask] = padding
    for at in range(0, max(shares), CAPACITY):
        part = slice(at, at + CAPACITY)
        yield [
            Rows(
                {name: x[part] for name, x in mine.fields.items()},
                mine.mask[part],
                mine.index[part],
            )
            for mine in rows
        ]


SHARES = [
    (1,), (11,), (1, 0), (0, 1), (5, 2), (10, 1), (5, 5, 1), (0, 11, 0), (23, 0, 0),
    (1, 0, 0, 0), (4, 2, 1, 0), (8, 8, 4, 3), (20, 1, 1, 1), (0, 0, 0, 7),
]  # fmt: skip


@pytest.mark.parametrize("shares", SHARES)
def test_means_are_exact(shares: tuple[int, ...]) -> None:
    _, evaluation, params = CLUSTERS[len(shares)]
    batch = batch_of(sum(shares))
    count, means = evaluation(params, batches_of(batch, shares, np.nan))
    losses, metrics = mlp_loss(mlp_params(), batch)
    assert count == sum(shares)
    assert means["loss"] == pytest.approx(
        np.mean(np.asarray(losses, np.float64)), rel=1e-6
    )
    # Counts are whole numbers: their mean is right to the last bit.
    assert means["above"] == int(metrics["above"].sum()) / sum(shares)
    assert means["thousands"] == 1_000_003
    assert list(means) == ["loss", "above", "thousands"]


def test_one_shape_is_compiled_once() -> None:
    _, evaluation, params = setup(3)
    traces.clear()
    for shares in [(5, 5, 1), (11, 0, 0), (1, 1, 1)]:
        evaluation(params, batches_of(batch_of(sum(shares)), shares, 0.0))
    assert traces == [(CAPACITY,)]
    programs: Any = evaluation._sums
    assert programs._cache_size() == 1


def test_whole_numbers_are_not_rounded_in_float32() -> None:
    """2**24 + 1 is no float32: a mean of floats would lose the one."""
    workers = local_workers(2)

    def counting(params: Any, batch: Any) -> tuple[jax.Array, dict]:
        return batch["y"] * params["w"], {"n": jnp.full_like(batch["index"], 2**24 + 1)}

    evaluation = Evaluation(workers, counting, Exchange(workers))
    sharding = NamedSharding(workers.local_mesh, SPLIT)
    params = {"w": jax.device_put(np.ones(2, np.float32), sharding)}
    _, means = evaluation(params, batches_of(batch_of(3), (2, 1), 0.0))
    assert means["n"] == 2**24 + 1


def test_nothing_to_evaluate() -> None:
    _, evaluation, params = CLUSTERS[2]
    empty = split(batch_of(0), (0, 0), (CAPACITY, CAPACITY))
    with pytest.raises(UserError, match="evaluation set is empty"):
        evaluation(params, [empty])

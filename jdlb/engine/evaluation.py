"""Exact means over a data set that no allocation divides evenly.

Every worker sums over its own rows, on its own, as many batches as it takes; the sums
of all workers are added once at the end. No mean of means, no dropped remainder, and
one compiled program a process whatever the shares.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jdlb.engine.exchange import Exchange
from jdlb.engine.mesh import SPLIT, WHOLE, Workers, host_rows, put_split
from jdlb.engine.programs import LossFunction, clean_batch
from jdlb.engine.step import WorkerRows
from jdlb.errors import UserError


class Sums(NamedTuple):
    """Sums over the real rows of one worker; counts and truths as integers."""

    examples: Array
    loss: Array
    metrics: dict[str, Array]


class Evaluation:
    """Evaluates parameters under one loss function, one batch shape."""

    def __init__(self, workers: Workers, loss: LossFunction, exchange: Exchange):
        self._workers = workers
        self._exchange = exchange

        def sums(
            params: PyTree,
            fields: Mapping[str, Array],
            mask: Array,
            index: Array,
            seed_epoch: Array,
        ) -> Sums:
            params = jax.tree.map(lambda leaf: leaf[0], params)
            losses, metrics = loss(params, clean_batch(fields, mask, index, seed_epoch))
            return jax.tree.map(
                lambda x: x[None],
                Sums(
                    mask.sum(dtype=jnp.int32),
                    _masked_sum(mask, losses),
                    {name: _masked_sum(mask, x) for name, x in metrics.items()},
                ),
            )

        self._sums = jax.jit(
            jax.shard_map(
                sums,
                mesh=workers.local_mesh,
                in_specs=(SPLIT, SPLIT, SPLIT, SPLIT, WHOLE),
                out_specs=SPLIT,
                check_vma=False,
            )
        )

    def __call__(
        self, params: PyTree, batches: Iterable[Sequence[WorkerRows]]
    ) -> tuple[int, dict[str, float]]:
        """The number of examples and the mean of "loss" and every metric.

        Args:
          params: leaves [l, ...] over the local mesh.
          batches: rows of each local worker, all padded to one capacity; at least
            one batch, of padding alone for a process without rows.

        Raises:
          UserError: there is not one example.
        """
        totals = np.zeros(1)
        names: list[str] = []
        for batch in batches:
            sums = self._sums(params, *self._place(batch))
            names = sorted(sums.metrics)
            columns = [sums.examples, sums.loss, *(sums.metrics[n] for n in names)]
            rows = np.stack(
                [host_rows(self._workers, c).astype(np.float64) for c in columns],
                axis=1,
            )
            totals = totals + rows
        count, *table = self._exchange.gather(totals).sum(axis=0).tolist()
        if not count:
            raise UserError("nothing to evaluate: the evaluation set is empty")
        means = [total / count for total in table]
        return int(count), dict(zip(["loss", *names], means, strict=True))

    def _place(self, batch: Sequence[WorkerRows]) -> tuple:
        split = functools.partial(put_split, self._workers.local_mesh)
        return (
            {name: split([r.fields[name] for r in batch]) for name in batch[0].fields},
            split([r.mask for r in batch]),
            split([r.index for r in batch]),
            np.zeros(2, np.uint32),
        )


def _masked_sum(mask: Array, x: Array) -> Array:
    """Booleans and integers are counted exactly, floats summed as they are."""
    wide = (
        jnp.int32
        if x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer)
        else x.dtype
    )
    return jnp.where(mask, x.astype(wide), 0).sum(dtype=wide)

"""Small facts that all processes must agree on, sent as integers.

One global program sums int32 vectors over the workers. Integers arrive as they were
sent, whatever the order of the sum; floats travel as their bits. With every worker
filling its own row the sum is a table of all of them; with the lead alone filling it,
a broadcast. Works with unequal numbers of local devices, where JAX's own multi-host
helpers do not.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float64, Int32, PyTree, UInt32

from jdlb.engine.mesh import (
    DATA_AXIS,
    SPLIT,
    WHOLE,
    Workers,
    host_rows,
    split_array,
)


class Exchange:
    """Sums over all workers; one compiled program a vector length.

    Called by the main thread of every process, in the same order everywhere.
    """

    def __init__(self, workers: Workers):
        self._workers = workers
        self._sum = jax.jit(
            jax.shard_map(
                lambda piece: jax.lax.psum(piece[0], DATA_AXIS),
                mesh=workers.mesh,
                in_specs=SPLIT,
                out_specs=WHOLE,
            )
        )

    def total(self, rows: Int32[np.ndarray, "l n"]) -> Int32[np.ndarray, " n"]:
        """The sum over all workers of one vector each (axis l: local workers)."""
        devices = self._workers.local_devices
        pieces = [
            jax.device_put(np.array(row)[None], device)
            for row, device in zip(rows, devices, strict=True)
        ]
        total = self._sum(split_array(self._workers.mesh, pieces))
        return np.asarray(total.addressable_shards[0].data)

    def gather(self, rows: Float64[np.ndarray, "l k"]) -> Float64[np.ndarray, "w k"]:
        """The table of all workers' rows, bit for bit, on every process."""
        columns = rows.shape[1] * 2
        table = np.zeros((len(rows), self._workers.count, columns), np.int32)
        bits = np.ascontiguousarray(rows, np.float64).view(np.int32)
        for i, w in enumerate(self._workers.local):
            table[i, w] = bits[i]
        total = self.total(table.reshape(len(rows), -1))
        return total.reshape(self._workers.count, columns).view(np.float64)

    def from_lead(self, values: Int32[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        """The lead's integers, on every process."""
        rows = np.zeros((len(self._workers.local), len(values)), np.int32)
        if self._workers.leads:
            rows[0] = values
        return self.total(rows)


class Digest:
    """A checksum of each local replica's parameters, in integers."""

    def __init__(self, workers: Workers):
        self._workers = workers
        self._digest = jax.jit(
            jax.shard_map(
                lambda params: _digest_of_one(params)[None],
                mesh=workers.local_mesh,
                in_specs=SPLIT,
                out_specs=SPLIT,
            )
        )

    def of(self, params: PyTree) -> UInt32[np.ndarray, " l"]:
        """One integer a local worker; equal for equal bits, position included.

        Args:
          params: leaves [l, ...] over the local mesh.
        """
        return host_rows(self._workers, self._digest(params))


def _digest_of_one(params: PyTree) -> UInt32[Array, ""]:
    digest = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(params):
        words = _words(leaf)
        placed = words ^ _mixed(jnp.arange(words.size, dtype=jnp.uint32))
        digest = _mixed(digest) + _mixed(placed).sum(dtype=jnp.uint32)
    return digest


def _mixed(words: UInt32[Array, "*n"]) -> UInt32[Array, "*n"]:
    """Each word through a bijection in which every bit moves about half of the others.

    A weighted sum would not do: two flipped signs change it by 2 * 2**31, which is 0.
    The constants are those of Murmur3's finaliser (Appleby; public domain).
    """
    words = words + jnp.uint32(0x9E3779B9)
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def _words(leaf: Array) -> UInt32[Array, " n"]:
    """The bits of an array as unsigned 32-bit words, narrower types widened."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(leaf, unsigned)
    return bits.reshape(-1).astype(jnp.uint32)

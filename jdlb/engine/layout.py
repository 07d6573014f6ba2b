"""Where everything lies in the one vector that a step reduces.

A worker's contribution is a single flat vector: the sum of the gradients of its
examples, then a few statistics. One buffer, one collective: a step costs one message
whatever the number of parameters. Pure; knows no mesh and no time.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from jdlb.errors import UserError


class Statistics(NamedTuple):
    """What travels beside the gradient; sums over examples (axes: m metrics, w workers).

    `bad` and `failed` are one-hot before the reduction, so that afterwards they name
    the workers whose contribution was not finite, or that could not compute at all.
    """

    loss_sum: Float[Array | np.ndarray, ""]
    examples: Float[Array | np.ndarray, ""]
    metric_sums: Float[Array | np.ndarray, "m"]
    bad: Float[Array | np.ndarray, "w"]
    failed: Float[Array | np.ndarray, "w"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of the flat vector (axis f) for one model on `workers` workers."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    metric_names: tuple[str, ...]
    workers: int

    @property
    def dtype(self) -> np.dtype:
        """Sums are kept in float64 when any parameter is, else in float32.

        Counts stay exact up to 2**24 examples a global batch in float32.
        """
        wide = np.dtype(np.float64)
        return wide if wide in self.dtypes else np.dtype(np.float32)

    @property
    def parameters(self) -> int:
        """P, the number of parameters."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    @property
    def length(self) -> int:
        """F, the length of the flat vector."""
        return self.parameters + 2 + len(self.metric_names) + 2 * self.workers

    def pack(self, gradient: PyTree, statistics: Statistics) -> Float[Array, "f"]:
        """The flat vector of one worker."""
        leaves = jax.tree.leaves(gradient)
        parts = [leaf.astype(self.dtype).reshape(-1) for leaf in leaves]
        parts += [jnp.atleast_1d(x).astype(self.dtype) for x in statistics]
        return jnp.concatenate(parts)

    def gradient(self, gradient: Float[Array, "p"]) -> PyTree:
        """The gradient as a tree like the parameters, in their dtypes."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        pieces = jnp.split(gradient, ends[:-1]) if len(ends) > 1 else [gradient]
        leaves = [
            piece.reshape(shape).astype(dtype)
            for piece, shape, dtype in zip(
                pieces, self.shapes, self.dtypes, strict=True
            )
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    def statistics(self, tail: Float[Array | np.ndarray, "k"]) -> Statistics:
        """The statistics in the tail of the flat vector, after the parameters."""
        m, w = len(self.metric_names), self.workers
        return Statistics(
            tail[0],
            tail[1],
            tail[2 : 2 + m],
            tail[2 + m : 2 + m + w],
            tail[2 + m + w :],
        )

    @property
    def bad_bits(self) -> int:
        """Where in the flat vector `Statistics.bad` begins."""
        return self.length - 2 * self.workers

    @property
    def failed_bits(self) -> int:
        """Where in the flat vector `Statistics.failed` begins."""
        return self.length - self.workers

    def failure(self, worker: int) -> np.ndarray:
        """The contribution [f] of a worker that could not compute: its bit alone."""
        flat = np.zeros(self.length, self.dtype)
        flat[self.failed_bits + worker] = 1
        return flat


def layout_of(params: PyTree, metric_names: tuple[str, ...], workers: int) -> Layout:
    """The layout for `params` (arrays or their shapes).

    Raises:
      UserError: there is no parameter, or one that is not a floating-point array.
    """
    leaves, treedef = jax.tree.flatten(params)
    if not leaves:
        raise UserError("the parameters are empty: pass the tree that flax's init gave")
    for path, leaf in jax.tree.leaves_with_path(params):
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            raise UserError(
                f"parameter {jax.tree_util.keystr(path)} is the {type(leaf).__name__} "
                f"{leaf!s:.60}: make it an array"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"parameter {jax.tree_util.keystr(path)} has dtype {leaf.dtype}: "
                "only floating-point parameters can be trained; keep others outside"
            )
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    # NumPy's float64 becomes float32 on devices unless JAX is told to keep 64 bits.
    dtypes = tuple(jax.dtypes.canonicalize_dtype(leaf.dtype) for leaf in leaves)
    return Layout(treedef, shapes, dtypes, metric_names, workers)


def all_finite(flat: Float[Array, "n"]) -> Bool[Array, ""]:
    """Whether no entry is NaN or infinite."""
    return jnp.isfinite(flat).all()

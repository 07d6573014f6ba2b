"""The bodies of the three programs of a step, as pure functions.

`compute` is local and free of collectives: the masked sum over a worker's examples.
`reduce` is one `psum`. `apply` divides once and updates every replica. Each body sees
the piece of one worker; `step` puts them under `shard_map` and compiles them.

Axes: c capacity, f flat vector, k statistics, p parameters.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int32, PyTree, UInt32

from jdlb.engine.layout import Layout, Statistics, all_finite
from jdlb.engine.mesh import DATA_AXIS
from jdlb.errors import UserError

Batch = Mapping[str, Array]
"""Fields [c, ...] of the source, with "index" [c] and one random key an example in
"key" [c], a function of (seed, epoch, index) alone."""

LossFunction = Callable[[PyTree, Batch], tuple[Array, Mapping[str, Array]]]
"""(parameters, batch) -> losses [c] and metrics {name: [c]}: per example, never means."""


class ReplicaState(NamedTuple):
    """What each worker keeps; every leaf has a leading axis over the workers.

    A halted replica ignores updates until the host says otherwise: between a failure
    and the host seeing it, steps in flight change nothing.
    """

    params: PyTree
    optimizer_state: PyTree
    halted: Bool[Array, " l"]


def clean_batch(
    fields: Mapping[str, Array],
    mask: Bool[Array, " c"],
    index: Int32[Array, " c"],
    seed_epoch: UInt32[Array, "2"],
) -> dict[str, Array]:
    """The batch a loss function sees: padding replaced, index and keys added.

    Padded rows become copies of the first row. What they held cannot leak, and a
    gradient that is undefined at zeros (a norm, say) stays defined, which a padding
    of zeros would not give.
    """
    clean = {
        name: jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, x[:1])
        for name, x in fields.items()
    }
    clean["index"] = jnp.where(mask, index, index[:1])
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), seed_epoch[0])
    key = jax.random.fold_in(key, seed_epoch[1])
    clean["key"] = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, clean["index"])
    return clean


def masked_sums(
    layout: Layout,
    losses: Float[Array, " c"],
    metrics: Mapping[str, Array],
    mask: Bool[Array, " c"],
) -> tuple[Float[Array, ""], Float[Array, " m"]]:
    """Sums over the real rows. `where`, not a product: 0 * NaN is NaN."""

    def total(x: Array) -> Array:
        return jnp.where(mask, x.astype(layout.dtype), 0).sum()

    sums = [total(metrics[name]) for name in layout.metric_names]
    return total(losses), jnp.stack(sums) if sums else jnp.zeros(0, layout.dtype)


def compute(
    loss: LossFunction,
    layout: Layout,
    params: PyTree,
    fields: Mapping[str, Array],
    mask: Bool[Array, " c"],
    index: Int32[Array, " c"],
    worker: Int32[Array, "1"],
    seed_epoch: UInt32[Array, "2"],
) -> tuple[Float[Array, "1 f"], Float[Array, "1"]]:
    """One worker's contribution, and a small marker that is ready when it is.

    `params` has the leading replica axis of length 1 and varies over the mesh, so
    that JAX puts no collective of its own into the gradient.
    """
    params = jax.tree.map(lambda leaf: leaf[0], params)
    batch = clean_batch(fields, mask, index, seed_epoch)

    def local_sum(params: PyTree) -> tuple[Array, tuple[Array, Array]]:
        losses, metrics = loss(params, batch)
        loss_sum, metric_sums = masked_sums(layout, losses, metrics, mask)
        return loss_sum, (loss_sum, metric_sums)

    with jax.named_scope("jdlb.compute"):
        gradient, (loss_sum, metric_sums) = jax.grad(local_sum, has_aux=True)(params)
    count = mask.sum().astype(layout.dtype)
    nobody = jnp.zeros(layout.workers, layout.dtype)
    flat = layout.pack(
        gradient, Statistics(loss_sum, count, metric_sums, nobody, nobody)
    )
    # Without real rows the model ran on padding, and whatever came of it is no fault.
    bad = (count > 0) & ~all_finite(flat)
    flat = jnp.where(bad | (count == 0), 0, flat)
    flat = flat.at[layout.bad_bits + worker[0]].set(bad.astype(layout.dtype))
    return flat[None], count[None]


def reduce(
    flat: Float[Array, "1 f"],
) -> tuple[Float[Array, " f"], Float[Array, "1"]]:
    """The sum over all workers, and a small marker that is ready when it is.

    The only collective of a step, alone in its program: two in one program may be
    ordered differently by different processes, and hang.
    """
    with jax.named_scope("jdlb.reduce"):
        total = jax.lax.psum(flat[0], DATA_AXIS)
    return total, total[-1:]


def apply(
    optimizer: optax.GradientTransformation,
    layout: Layout,
    state: ReplicaState,
    reduced: Float[Array, " f"],
) -> tuple[ReplicaState, Float[Array, "1 k"]]:
    """Divide by the count, update one replica, or skip on all of them alike.

    Returns:
      the new state, and a summary [1, k]: whether the step counted, then the
      statistics of the whole global batch.
    """
    params, optimizer_state, halted = jax.tree.map(lambda leaf: leaf[0], state)
    tail = reduced[layout.parameters :]
    statistics = layout.statistics(tail)
    failed = (statistics.failed > 0).any()
    halted = halted | failed
    good = ~halted & ~(statistics.bad > 0).any() & all_finite(reduced)
    with jax.named_scope("jdlb.apply"):
        mean = reduced[: layout.parameters] / jnp.maximum(statistics.examples, 1)
        updates, new_optimizer_state = optimizer.update(
            layout.gradient(mean), optimizer_state, params
        )
        new_params = optax.apply_updates(params, updates)

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(good, new, old)

    state = ReplicaState(
        jax.tree.map(choose, new_params, params),
        jax.tree.map(choose, new_optimizer_state, optimizer_state),
        halted,
    )
    summary = jnp.concatenate([good[None].astype(layout.dtype), tail])
    return jax.tree.map(lambda leaf: leaf[None], (state, summary))


def metric_names_of(
    loss: LossFunction, params: PyTree, batch: Mapping[str, Any], capacity: int
) -> tuple[str, ...]:
    """The names of the loss function's metrics, in the order the layout keeps.

    Args:
      params, batch: arrays or shapes; fields of the batch are [capacity, ...].

    Raises:
      UserError: what it returns is not one value an example.
    """
    outcome = jax.eval_shape(loss, params, batch)
    if not (isinstance(outcome, tuple) and len(outcome) == 2):
        raise UserError(
            "the loss function must return (losses, metrics), per example: "
            f"losses [c] and a dict of [c] arrays, which may be empty; got {outcome}"
        )
    losses, metrics = outcome
    if not isinstance(metrics, Mapping) or "loss" in metrics:
        raise UserError(
            "the metrics of the loss function must be a dict of [c] arrays without "
            f"the name 'loss', which the mean of the losses has; got {metrics}"
        )
    for name, value in [("losses", losses), *metrics.items()]:
        if value.shape != (capacity,):
            raise UserError(
                f"the loss function returned {name!r} of shape {value.shape} for "
                f"{capacity} examples: return one value an example, not a mean"
            )
    return tuple(sorted(metrics))

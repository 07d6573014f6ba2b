"""`bench step`: what the three programs cost where nothing needs balancing.

Two emulated CPU devices, equal shares, against one plain `jax.jit` data-parallel step
of the same model and optimizer. Judged by the ratio within one run: the two are timed
in turns, block by block, and the median of the blocks' ratios is told.
"""

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jaxtyping import PyTree
from rich.console import Console

from jdlb.data.loader import WorkerBatch
from jdlb.engine.mesh import SPLIT, WHOLE, Workers, order_workers
from jdlb.engine.programs import Batch
from jdlb.engine.step import StepEngine
from jdlb.models.cnn import Cnn
from jdlb.models.losses import softmax_cross_entropy

DEVICES = 2
GLOBAL_BATCH = 128
WARM_UP_STEPS = 5
STEPS = 10
BLOCKS = 15


def bench_step() -> None:
    """Time both and print the ratio."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    workers = order_workers(jax.devices("cpu"), jax.process_index())
    rng = np.random.default_rng(0)
    images = rng.normal(size=(GLOBAL_BATCH, 28, 28, 1)).astype(np.float32)
    labels = rng.integers(0, 10, GLOBAL_BATCH, dtype=np.int32)
    params = jax.device_get(Cnn().init(jax.random.key(0), images[:1])["params"])
    ours = _our_step(workers, params, images, labels)
    plain = _plain_step(workers, params, images, labels)
    for step in (ours, plain):
        _seconds(step, WARM_UP_STEPS)
    pairs = [(_seconds(ours, STEPS), _seconds(plain, STEPS)) for _ in range(BLOCKS)]
    ratios = sorted(a / b for a, b in pairs)
    quarter = len(ratios) // 4
    Console().print(
        f"three programs {1e3 * statistics.median(a for a, _ in pairs):.1f} ms a step, "
        f"one plain jit {1e3 * statistics.median(b for _, b in pairs):.1f} ms\n"
        f"ratio {statistics.median(ratios):.3f} (quartiles {ratios[quarter]:.3f} to "
        f"{ratios[-1 - quarter]:.3f}; {BLOCKS} blocks of {STEPS} steps; "
        f"B = {GLOBAL_BATCH} on {DEVICES} emulated devices)",
        highlight=False,
    )


def _loss(params: PyTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = Cnn().apply({"params": params}, batch["image"])
    assert isinstance(logits, jax.Array)
    return softmax_cross_entropy(logits, batch["label"])


def _optimizer() -> optax.GradientTransformation:
    return optax.sgd(0.01, momentum=0.9)


def _our_step(
    workers: Workers, params: PyTree, images: np.ndarray, labels: np.ndarray
) -> Callable[[], jax.Array]:
    example = {"image": images[0], "label": labels[0]}
    engine = StepEngine(workers, _loss, _optimizer(), params, example)
    size = GLOBAL_BATCH // workers.count
    engine.prepare([size] * workers.count)
    rows = [
        WorkerBatch(
            {"image": images[part], "label": labels[part]},
            np.ones(size, bool),
            np.arange(size, dtype=np.int32),
        )
        for part in (slice(w * size, (w + 1) * size) for w in range(workers.count))
    ]
    inputs = engine.place(rows, seed=0, epoch=0)
    return lambda: engine.step(inputs).summary


def _plain_step(
    workers: Workers, params: PyTree, images: np.ndarray, labels: np.ndarray
) -> Callable[[], jax.Array]:
    whole = NamedSharding(workers.mesh, WHOLE)
    split = NamedSharding(workers.mesh, SPLIT)
    optimizer = _optimizer()
    state = jax.device_put((params, optimizer.init(params)), whole)
    batch = jax.device_put({"image": images, "label": labels}, split)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: tuple[PyTree, optax.OptState], batch: Batch
    ) -> tuple[tuple[PyTree, optax.OptState], jax.Array]:
        def mean_loss(params: PyTree) -> jax.Array:
            return jnp.mean(_loss(params, batch)[0])

        loss, gradient = jax.value_and_grad(mean_loss)(state[0])
        updates, optimizer_state = optimizer.update(gradient, state[1], state[0])
        return (optax.apply_updates(state[0], updates), optimizer_state), loss

    def run() -> jax.Array:
        nonlocal state
        state, loss = step(state, batch)
        return loss

    return run


def _seconds(step: Callable[[], jax.Array], steps: int) -> float:
    """Mean seconds of a step over a run of them."""
    start = time.perf_counter()
    for _ in range(steps - 1):
        step()
    step().block_until_ready()
    return (time.perf_counter() - start) / steps

"""The canonical loop: one run from a configuration to records and parameters.

Order within an epoch: train its rounds, each ending with a decision; write their
records; evaluate outside of the training clock; write that record. A record is on disk
before anything new starts, so that a run cut short leaves whole lines.
"""

import dataclasses
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from experiments.config import Config, to_json
from jdlb import records
from jdlb.balance import policies
from jdlb.balance.policies.protocol import AnyPolicy, Cluster
from jdlb.data import augment, builders
from jdlb.data.memory import in_memory
from jdlb.engine.mesh import Workers
from jdlb.engine.programs import Batch, LossFunction
from jdlb.models.cnn import Cnn
from jdlb.models.losses import softmax_cross_entropy
from jdlb.records import EvaluationRecord, Record, RunHeader
from jdlb.trainer import Trainer

# Mean and standard deviation of MNIST's pixels, in units of the full range.
MEAN, STD = (0.1307,), (0.3081,)

OnStep = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained: data, network and loss, the same for every policy."""

    splits: builders.Splits
    params: PyTree
    loss: LossFunction


def make_task(config: Config) -> Task:
    """Open the data and initialise the network.

    Raises:
      UserError: the data set is not prepared.
    """
    splits = builders.open_splits(config.dataset, config.data_folder)
    if config.in_memory:
        splits = builders.Splits(in_memory(splits.train), in_memory(splits.test))
    first = np.asarray(splits.train[0]["image"])
    model = Cnn()
    shape = jnp.zeros((1, *first.shape), jnp.float32)
    params = model.init(jax.random.key(config.seed), shape)["params"]

    def loss(params: PyTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = model.apply({"params": params}, batch["image"])
        assert isinstance(logits, jax.Array)
        return softmax_cross_entropy(logits, batch["label"])

    return Task(splits, jax.device_get(params), loss)


def make_policy(name: str, config: Config) -> AnyPolicy:
    """The policy of a name, with what the configuration says for it."""
    options = {"shares": config.shares} if name == "fixed" else {}
    return policies.get(name, **options)


def make_cluster(config: Config, workers: int) -> Cluster:
    """Ladder and limits for so many workers.

    Raises:
      UserError: the global batch does not fit the workers or their caps.
    """
    return Cluster.create(
        workers,
        config.global_batch,
        granule=config.granule,
        growth=config.growth,
        caps=config.caps or None,
    )


def make_optimizer(config: Config, steps: int) -> optax.GradientTransformation:
    """SGD with momentum under the configured schedule over `steps` in all."""
    after = max(steps - config.warmup_steps, 1)
    rest = (
        optax.cosine_decay_schedule(config.learning_rate, after)
        if config.schedule == "cosine"
        else optax.constant_schedule(config.learning_rate)
    )
    warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    rate = optax.join_schedules([warmup, rest], [config.warmup_steps])
    parts = []
    if config.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay))
    return optax.chain(*parts, optax.sgd(rate, momentum=config.momentum))


def make_trainer(
    config: Config,
    task: Task,
    policy: str,
    workers: Workers | None = None,
    on_step: OnStep | None = None,
) -> Trainer:
    """The trainer of one policy; compiles its first programs."""
    per_epoch = -(-len(task.splits.train) // config.global_batch)
    count = workers.count if workers is not None else jax.device_count()
    return Trainer(
        loss=task.loss,
        params=task.params,
        optimizer=make_optimizer(config, per_epoch * config.epochs),
        source=task.splits.train,
        global_batch=config.global_batch,
        policy=make_policy(policy, config),
        seed=config.seed,
        transform=augment.normalise(MEAN, STD),
        cluster=make_cluster(config, count),
        aligned=config.aligned,
        dead_band=config.dead_band,
        dry_run=config.dry_run,
        round_steps=config.round_steps,
        epochs=config.epochs if config.weigh_compilation else None,
        workers=workers,
        run_ahead=config.run_ahead,
        prefetch=config.prefetch,
        on_step=on_step,
    )


def header(
    config: Config, trainer: Trainer, policy: str, speeds: tuple[float, ...] = ()
) -> RunHeader:
    """The first record of a run."""
    return RunHeader(
        policy=policy,
        config=to_json(config),
        workers=trainer.workers.count,
        processes=jax.process_count(),
        global_batch=config.global_batch,
        speeds=speeds,
        versions={
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
            "platform": platform.platform(),
            "device": trainer.workers.devices[0].device_kind,
        },
    )


def train(config: Config, task: Task, trainer: Trainer) -> Iterator[Record]:
    """The loop. Every process of the job runs it to its end."""
    for epoch in range(config.epochs):
        record = None
        for record in trainer.rounds():
            yield record
        assert record is not None
        examples, metrics = trainer.evaluate(task.splits.test)
        yield EvaluationRecord(
            policy=record.policy,
            epoch=epoch,
            training_seconds=trainer.training_seconds,
            examples=examples,
            metrics=metrics,
        )


def open_records(folder: Path) -> TextIO:
    """A new records file in `folder`, for this run alone, readable by the user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return (folder / records.RECORDS_FILE).open("x", encoding="utf-8")


def save_params(folder: Path, params: PyTree) -> Path:
    """Write the final parameters; `flax.serialization.msgpack_restore` reads them."""
    path = folder / "params.msgpack"
    path.write_bytes(flax.serialization.to_bytes(params))
    return path

"""Which rows of the data set every worker takes at every step, by arithmetic alone.

The order of an epoch depends on (seed, epoch) and on nothing else; an allocation only
says where each global batch is cut. So every example is used exactly once an epoch
whatever the shares do, and all workers take the same number of steps. NumPy only; must
not know sources, threads or time.
"""

from collections.abc import Sequence

import numpy as np

from jdlb.balance.allocation import split_proportionally
from jdlb.errors import UserError

_KEY_LIMIT = 2**64


def epoch_order(seed: int, epoch: int, examples: int) -> np.ndarray:
    """The order in which an epoch uses the examples: int64 [N], a permutation.

    Sorts the raw output of a counter-based generator: NumPy guarantees that stream
    across versions and machines, which it does not for `Generator.permutation`.

    >>> epoch_order(0, 0, 5).tolist() == epoch_order(0, 0, 5).tolist()
    True
    >>> sorted(epoch_order(0, 1, 5).tolist())
    [0, 1, 2, 3, 4]

    Raises:
      UserError: there are no examples, or the seed or epoch is not in [0, 2^64).
    """
    if examples < 1:
        raise UserError(
            f"the data source has {examples} examples: name a split that has some, "
            "or prepare the data set again"
        )
    for what, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value < _KEY_LIMIT:
            raise UserError(f"{what} is {value}: give an integer from 0 to 2^64 - 1")
    key = np.array([seed, epoch], dtype=np.uint64)
    # Equal draws are as good as impossible, but the stable sort orders them, too.
    draws = np.random.Philox(key=key).random_raw(examples)
    return np.argsort(draws, kind="stable").astype(np.int64, copy=False)


def steps_in_epoch(examples: int, global_batch: int) -> int:
    """Optimizer steps that use each example once; the last may be a partial batch.

    >>> steps_in_epoch(11, 4)
    3
    """
    if global_batch < 1:
        raise UserError(f"the global batch is {global_batch}: it must be 1 or more")
    return -(-examples // global_batch)


def step_rows(order: np.ndarray, step: int, global_batch: int) -> np.ndarray:
    """The rows of one global batch: int64 [B], or fewer at the last step of an epoch.

    Raises:
      ValueError: the epoch has no such step.
    """
    steps = steps_in_epoch(len(order), global_batch)
    if not 0 <= step < steps:
        raise ValueError(f"no step {step} in an epoch of {steps} steps")
    return order[step * global_batch : (step + 1) * global_batch]


def worker_rows(rows: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Cut the rows of one step into those of each worker: W arrays, in mesh order.

    `sizes` [W] are the examples of a full batch. A partial batch is cut in the same
    proportions, and leaves workers without rows where it is too small for all.

    >>> [part.tolist() for part in worker_rows(np.arange(5), (2, 3))]
    [[0, 1], [2, 3, 4]]

    Raises:
      ValueError: there are more rows than `sizes` have room for.
    """
    total = sum(sizes)
    if len(rows) > total:
        raise ValueError(f"{len(rows)} rows do not fit shares that sum to {total}")
    counts = sizes if len(rows) == total else split_proportionally(sizes, len(rows))
    return np.split(rows, np.cumsum(counts)[:-1])

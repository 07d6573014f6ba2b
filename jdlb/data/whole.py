"""Rows of a whole source for evaluation: each worker's own, in as many batches as it
takes, all padded to one capacity. Knows what `loader` knows.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jdlb.balance.allocation import round_shares
from jdlb.balance.ladder import Limits
from jdlb.data.loader import (
    Source,
    Transform,
    WorkerBatch,
    fetch,
    pad,
    read_standard,
)


def worker_spans(sizes: Sequence[int], examples: int) -> list[np.ndarray]:
    """Rows 0 to `examples` - 1 cut in proportion to `sizes` [W]: W int64 arrays.

    Every row once; workers without rows where there are too few.

    >>> [span.tolist() for span in worker_spans((1, 2), 5)]
    [[0, 1], [2, 3, 4]]
    """
    workers = len(sizes)
    limits = Limits((0,) * workers, (examples,) * workers)
    shares = round_shares(sizes, examples, limits)
    return np.split(np.arange(examples), np.cumsum(shares)[:-1])


def worker_batches(
    source: Source,
    transform: Transform,
    rows: Sequence[np.ndarray],
    capacity: int,
) -> Iterator[tuple[WorkerBatch, ...]]:
    """Batches of every local worker until the last one is through its rows.

    A worker that is through before gets padding alone; so does a process without any
    rows, in one batch, as its programs must run all the same.

    Args:
      source: at least one example.
      transform: sees seed 0 and epoch 0.
      rows: int64 arrays, one a local worker.
      capacity: rows of each batch.

    Raises:
      UserError: an example is not like the first of the source.
    """
    standard = read_standard(source, 0)
    longest = max(len(mine) for mine in rows)
    for start in range(0, max(longest, 1), capacity):
        batch = []
        for mine in rows:
            part = mine[start : start + capacity]
            fields = fetch(source, part, standard)
            batch.append(pad(transform(fields, part, 0, 0), part, capacity))
        yield tuple(batch)

"""Checks that all workers run the same thing from the same numbers. Used by `trainer`.

What differs between processes shows here as one line that names the worker, instead of
as a hang or as a model that nobody trained.
"""

import collections
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import UInt32

from jdlb.engine.exchange import Exchange
from jdlb.engine.mesh import Workers
from jdlb.errors import RunError, UserError


def check_start(
    exchange: Exchange,
    workers: Workers,
    facts: Mapping[str, int],
    digests: UInt32[np.ndarray, " l"],
) -> None:
    """Compare facts that must be the same on all processes, and the first parameters.

    Args:
      facts: name -> whole number below 2**53.
      digests: checksums of the parameters of the local workers.

    Raises:
      UserError: a fact differs.
      RunError: the parameters differ.
    """
    values = [float(value) for value in facts.values()]
    rows = [[*values, float(digest)] for digest in digests]
    table = exchange.gather(np.array(rows, np.float64))
    for name, column in zip(facts, table.T, strict=False):
        other = np.flatnonzero(column != column[0]).tolist()
        if other:
            raise UserError(
                f"the {name} of {name_workers(other)} is not that of worker 0: start "
                "all processes with the same code, configuration and data"
            )
    check_replicas(table[:, -1].tolist(), "at the start")


def check_replicas(digests: Sequence[float], when: str) -> None:
    """Every replica must hold the same bits; the few that differ are named.

    Raises:
      RunError: some differ from most.

    >>> check_replicas([7, 7, 8, 7], "after round 3")
    Traceback (most recent call last):
    jdlb.errors.RunError: the parameters of worker 2 differ from the others after round 3
    """
    usual = collections.Counter(digests).most_common(1)[0][0]
    other = [w for w, digest in enumerate(digests) if digest != usual]
    if other:
        raise RunError(
            f"the parameters of {name_workers(other)} differ from the others {when}"
        )


def name_workers(workers: Sequence[int]) -> str:
    """Workers for people.

    >>> name_workers([3]), name_workers([0, 2])
    ('worker 3', 'workers 0, 2')
    """
    names = ", ".join(str(w) for w in workers)
    return f"worker {names}" if len(workers) == 1 else f"workers {names}"

"""True times from measured rounds: workers for a simulation that resembles a real run.

Fitted once, from all that is given; must not know what it is given (a job's records).
What a policy believes while it runs is fitted elsewhere, online.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from jdlb.balance.time_tables import TimeTable
from jdlb.errors import UserError


def fitted_table(
    name: str, capacities: Sequence[float], busy_seconds: Sequence[float]
) -> TimeTable:
    """The line through (capacity, mean busy seconds of a step), neither part negative.

    Least squares of the relative errors: noise grows with the time that it disturbs.

    Raises:
      UserError: fewer than two different capacities, or times that do not rise.
    """
    sizes = np.asarray(capacities, np.float64)
    seconds = np.asarray(busy_seconds, np.float64)
    if len(np.unique(sizes)) < 2:
        raise UserError(
            f"{name} was measured at {len(np.unique(sizes))} capacity: a line has two "
            "parameters; add a run of a policy that moves shares"
        )
    lines = np.stack([1 / seconds, sizes / seconds], axis=1)
    (fixed, example), _ = nnls(lines, np.ones(len(sizes)))
    if not example > 0:
        raise UserError(
            f"the times of {name} do not rise with its capacity "
            f"({seconds.min():.3g} to {seconds.max():.3g} s at {sizes.min():g} to "
            f"{sizes.max():g} examples): measure longer, on a quieter machine"
        )
    return TimeTable.affine(float(fixed), float(example), name)

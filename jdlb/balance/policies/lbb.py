"""The policy `lbb`: equal times by fitted cubics, then small moves."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from jdlb.balance.curves import Curves
from jdlb.balance.policies.boa import check_one_each
from jdlb.balance.policies.learning import learn
from jdlb.balance.policies.protocol import (
    Cluster,
    Observation,
    Policy,
    equal_targets,
    mean_seconds,
    seconds_at_targets,
)
from jdlb.balance.rungs import WholeRungs, fill
from jdlb.balance.time_model import TimeModel
from jdlb.balance.time_tables import TimeTable
from jdlb.errors import UserError

_PARAMETERS = 4
# SLSQP takes time as the cube of the number of workers: 0.1 s for this many.
_SLSQP_WORKERS = 32
# Points at which cubics are followed where SLSQP is not used.
_POINTS = 33


@dataclass(frozen=True, eq=False)
class LbbState:
    """Targets, and what leads to the next ones.

    Attributes:
      cubics: coefficients [W, 4] of `T_w(b / B)`, lowest power first; None until the
        first round where no tables were given.
      line: learns the fixed part of a step where no tables were given.
      tuning: rounds left in which shares are only tuned.
    """

    cluster: Cluster
    targets: np.ndarray
    cubics: np.ndarray | None
    line: TimeModel
    tuning: int = 0


def lbb(
    tables: Sequence[TimeTable] | None = None,
    small: float = 0.05,
    large: float = 0.3,
    window: int = 3,
) -> Policy[LbbState]:
    """Shares of equal time from cubic fits; three bands of spread decide what is done.

    LBB (J. Supercomputing 2023, doi 10.1007/s11227-023-05886-w): `min over b of
    (max T_i - min T_i)`, `sum b_i = B`, with a cubic `T_i(b)` fitted to times measured
    at powers of two, solved by SLSQP. While running, `SE = (max t - min t) / mean t`:
    below `small` nothing is done; below `large` about one sample goes from the slowest
    to the fastest; else `T_i(b) = a0 + (t_i - a0) / b_i * b` with the `a0` that `T_i`
    has, solved again, and after that shares are only tuned for a while. Faithful: the
    objective, cubic, solver and bands. Ours, or unknown:

    - the objective is not smooth; SLSQP gets it as `high - low` under
      `low <= T_i(b_i) <= high`. Above 32 workers, where it would take too long, and
      where it fails, the smallest makespan of the same curves is searched for instead;
    - powers of two are not measured by this rule: give them as tables, of at least
      four batches. Without, the cubic is a line learnt online, whose fixed part is `a0`;
    - "about one sample" is one granule of the ladder, and it does not move where it
      would make the fastest slower than the slowest is now, or when the slowest is at
      its floor, the fastest at its cap;
    - how long the window is is unknown here; ours is 3 rounds;
    - `b_i` is the capacity that was paid for; the spread is that of the times at the
      targets, as what the ladder makes of them is for no rule to even out.

    >>> cluster = Cluster.create(workers=2, global_batch=30, granule=1)
    >>> policy = lbb()
    >>> _, state = policy.init(cluster)
    >>> seen = Observation(
    ...     round=0, sizes=(15, 15), capacities=(15, 15), busy_seconds=(1.0, 2.0),
    ...     busy_median_seconds=(0.1, 0.2), busy_spread_seconds=(0.0, 0.0),
    ...     input_seconds=(0.0, 0.0), wait_seconds=(1.0, 0.0), measured_steps=(10, 10))
    >>> targets, state = policy.update(seen, state)
    >>> targets.round(3)
    array([20., 10.])

    Raises:
      UserError: bands that are not `0 <= small <= large`, a negative window, a table
        with fewer batches than a cubic has parameters; in `init`, another number of
        tables than workers.
    """
    if not 0 <= small <= large:
        raise UserError(f"bands {small} and {large}: use 0 <= small <= large")
    if window < 0:
        raise UserError(f"window {window}: use a number of rounds of at least 0")
    given = None if tables is None else tuple(tables)
    for table in given or ():
        if len(table.sizes) < _PARAMETERS:
            raise UserError(
                f"the time table of {table.name!r} has {len(table.sizes)} batches, "
                f"fewer than the {_PARAMETERS} parameters of a cubic: measure more"
            )

    def init(cluster: Cluster) -> tuple[np.ndarray, LbbState]:
        line = TimeModel.create(cluster.workers, bend=0.0)
        state = LbbState(cluster, equal_targets(cluster), None, line)
        if given is None:
            return state.targets, state
        check_one_each(given, cluster)
        cubics = np.array([_fit(table, cluster.global_batch) for table in given])
        targets = _solve(cubics, state.targets, cluster)
        return targets, dataclasses.replace(state, targets=targets, cubics=cubics)

    def update(
        observation: Observation, state: LbbState
    ) -> tuple[np.ndarray, LbbState]:
        line = learn(state.line, observation) if given is None else state.line
        state = dataclasses.replace(state, line=line, tuning=max(state.tuning - 1, 0))
        seconds = seconds_at_targets(observation, state.targets)
        measured = ~np.isnan(seconds)
        if not measured.any():
            return state.targets, state
        known = seconds[measured]
        spread = (
            (known.max() - known.min()) / known.max() / (known / known.max()).mean()
        )
        if spread < small:
            return state.targets, state
        if spread < large or state.tuning:
            targets = _tuned(observation, seconds, state)
            return targets, dataclasses.replace(state, targets=targets)
        cubics = _rescaled(observation, mean_seconds(observation), state)
        limits = observation.limits or state.cluster.limits
        cluster = dataclasses.replace(state.cluster, limits=limits)
        targets = _solve(cubics, state.targets, cluster)
        return targets, dataclasses.replace(
            state, targets=targets, cubics=cubics, tuning=window
        )

    return Policy("lbb", init, update)


def _fit(table: TimeTable, global_batch: int) -> np.ndarray:
    """Coefficients [4] of the cubic nearest to a table, of `b / B`."""
    powers = np.vander(np.array(table.sizes) / global_batch, _PARAMETERS, True)
    return np.linalg.lstsq(powers, np.array(table.step_seconds), rcond=None)[0]


def _rescaled(
    observation: Observation, seconds: np.ndarray, state: LbbState
) -> np.ndarray:
    """Lines [W, 4] through the fixed part of each worker and what it takes now."""
    batches = np.array(observation.capacities, np.float64)
    curves = state.line.curves
    # Who was not measured takes what its curve says.
    expected = (
        curves.seconds(batches)
        if state.cubics is None or state.line.seen.any()
        else _values(state.cubics, batches / state.cluster.global_batch)
    )
    seconds = np.where(np.isnan(seconds), expected, seconds)
    if state.line.seen.any():
        fixed = curves.seconds(np.zeros(len(batches)))
    else:
        fixed = np.zeros(len(batches)) if state.cubics is None else state.cubics[:, 0]
    # A cubic may begin below 0, and a step costs more than its fixed part.
    fixed = np.clip(fixed, 0.0, 0.99 * seconds)
    cubics = np.zeros((len(batches), _PARAMETERS))
    cubics[:, 0] = fixed
    cubics[:, 1] = (seconds - fixed) / batches * state.cluster.global_batch
    return cubics


def _tuned(
    observation: Observation, seconds: np.ndarray, state: LbbState
) -> np.ndarray:
    """Targets with one granule moved from the slowest worker to the fastest."""
    cluster, granule = state.cluster, state.cluster.ladder.granule
    limits = observation.limits or cluster.limits
    low = int(np.argmin(np.where(np.isnan(seconds), np.inf, seconds)))
    high = int(np.argmax(np.where(np.isnan(seconds), -np.inf, seconds)))
    targets = state.targets.copy()
    after = seconds[low] * (1 + granule / max(targets[low], 1.0))
    gives = targets[high] - granule >= limits.floors[high]
    if gives and targets[low] + granule <= limits.caps[low] and after < seconds[high]:
        targets[high] -= granule
        targets[low] += granule
    return targets


def _values(cubics: np.ndarray, shares: np.ndarray) -> np.ndarray:
    powers = np.vander(shares, _PARAMETERS, increasing=True)
    return (cubics * powers).sum(axis=1)


def _solve(cubics: np.ndarray, start: np.ndarray, cluster: Cluster) -> np.ndarray:
    """Targets [W] of the least difference between the largest and smallest time."""
    if cluster.workers <= _SLSQP_WORKERS:
        shares = _slsqp(cubics, start, cluster)
        if shares is not None:
            return shares * cluster.global_batch
    curves = _followed(cubics, cluster.global_batch)
    rungs, total = WholeRungs.of(cluster.limits), cluster.global_batch
    guess = float(curves.seconds(start).max())
    return fill(curves, total, rungs, guess).astype(np.float64)


def _slsqp(
    cubics: np.ndarray, start: np.ndarray, cluster: Cluster
) -> np.ndarray | None:
    """Shares [W] of the batch that sum to 1, or None where none were found."""
    workers, total = cluster.workers, cluster.global_batch
    shares = start / total
    # Times about 1, or the tolerance of the solver means nothing.
    cubics = cubics / np.abs(_values(cubics, shares)).max()
    derived = np.zeros_like(cubics)
    derived[:, :-1] = cubics[:, 1:] * np.arange(1, _PARAMETERS)
    first = _values(cubics, shares)
    eye, zeros, ones = np.eye(workers), np.zeros(workers), np.ones(workers)

    def room(x: np.ndarray) -> np.ndarray:
        times = _values(cubics, x[:-2])
        return np.concatenate([x[-1] - times, times - x[-2]])

    def room_slopes(x: np.ndarray) -> np.ndarray:
        rises = eye * _values(derived, x[:-2])
        return np.vstack(
            [
                np.column_stack([-rises, zeros, ones]),
                np.column_stack([rises, -ones, zeros]),
            ]
        )

    found = minimize(
        lambda x: x[-1] - x[-2],
        np.concatenate([shares, [first.min(), first.max()]]),
        jac=lambda _: np.concatenate([zeros, [-1.0, 1.0]]),
        method="SLSQP",
        bounds=[
            *((f / total, c / total) for f, c in _limits(cluster)),
            (None, None),
            (None, None),
        ],
        constraints=[
            {
                "type": "eq",
                "fun": lambda x: x[:-2].sum() - 1,
                "jac": lambda _: np.concatenate([ones, [0.0, 0.0]]),
            },
            {"type": "ineq", "fun": room, "jac": room_slopes},
        ],
        options={"maxiter": 200, "ftol": 1e-10},
    )
    shares = found.x[:-2]
    usable = found.success and np.all(np.isfinite(shares)) and np.all(shares >= 0)
    return shares / shares.sum() if usable else None


def _limits(cluster: Cluster) -> zip:
    return zip(cluster.limits.floors, cluster.limits.caps, strict=True)


def _followed(cubics: np.ndarray, global_batch: int) -> Curves:
    """Lines along the cubics up to the whole batch, denser where shares are small."""
    shares = np.geomspace(1 / global_batch, 1.0, _POINTS)
    powers = np.vander(shares, _PARAMETERS, increasing=True)
    seconds = cubics @ powers.T
    # A cubic may fall below 0, which no time does.
    seconds = np.maximum(seconds, 1e-3 * seconds.max(axis=1, keepdims=True))
    batches = np.broadcast_to(shares * global_batch, seconds.shape)
    beyond = (seconds[:, -1] - seconds[:, -2]) / (batches[:, -1] - batches[:, -2])
    return Curves.through(batches, seconds, np.zeros(len(cubics)), beyond)

"""The policy `lb_bsp_cpu`: shares proportional to a predicted speed."""

from dataclasses import dataclass

import numpy as np

from jdlb.balance.policies.protocol import (
    Cluster,
    Observation,
    Policy,
    equal_targets,
    mean_performance,
    proportional,
)
from jdlb.errors import UserError

# What the first coefficients count for, in rounds.
_PRIOR = 1.0
# A prediction this many times the last speed, or less than one over it, is cut.
_FURTHEST = 2.0


@dataclass(frozen=True, eq=False)
class LbBspCpuState:
    """One autoregressive model of the speed of each worker.

    Attributes:
      scale: first speed of each worker, [W]; NaN until it was measured.
      past: last relative speeds, newest first, [W, order].
      coefficients: [W, order + 1], the last one for the constant 1.
      inverse: inverse of the weighted sum of squares, [W, order + 1, order + 1].
    """

    global_batch: int
    scale: np.ndarray
    past: np.ndarray
    coefficients: np.ndarray
    inverse: np.ndarray


def lb_bsp_cpu(order: int = 2, forgetting: float = 0.95) -> Policy[LbBspCpuState]:
    """Shares proportional to the speed that each worker is predicted to have next.

    LB-BSP on CPU clusters (SoCC 2020; TCC 2021), where speeds change all the time:
    `b_i` proportional to a speed predicted by a NARX network from past speeds, CPU and
    memory use, trained beforehand. Faithful: shares by predicted speed. Ours: the
    prediction is a linear autoregressive model of the last `order` speeds and a
    constant, fitted online to each worker alone by recursive least squares with
    forgetting; CPU and memory use are not known here. It begins by predicting the last
    speed, which is `dlb`. Predictions beyond twice or half the last speed are cut.
    Speed is capacity per mean busy second.

    >>> cluster = Cluster.create(workers=2, global_batch=30, granule=1)
    >>> policy = lb_bsp_cpu()
    >>> _, state = policy.init(cluster)
    >>> seen = Observation(
    ...     round=0, sizes=(15, 15), capacities=(15, 15), busy_seconds=(1.0, 2.0),
    ...     busy_median_seconds=(0.1, 0.2), busy_spread_seconds=(0.0, 0.0),
    ...     input_seconds=(0.0, 0.0), wait_seconds=(1.0, 0.0), measured_steps=(10, 10))
    >>> targets, state = policy.update(seen, state)
    >>> targets
    array([20., 10.])

    Raises:
      UserError: an order below 1, or forgetting outside (0, 1].
    """
    if order < 1:
        raise UserError(f"order {order}: use at least 1 past speed")
    if not 0 < forgetting <= 1:
        raise UserError(f"forgetting {forgetting}: use more than 0 and at most 1")

    def init(cluster: Cluster) -> tuple[np.ndarray, LbBspCpuState]:
        workers = cluster.workers
        coefficients = np.zeros((workers, order + 1))
        coefficients[:, 0] = 1.0
        inverse = np.broadcast_to(
            np.eye(order + 1) / _PRIOR, (workers, *[order + 1] * 2)
        )
        state = LbBspCpuState(
            global_batch=cluster.global_batch,
            scale=np.full(workers, np.nan),
            past=np.ones((workers, order)),
            coefficients=coefficients,
            inverse=inverse.copy(),
        )
        return equal_targets(cluster), state

    def update(
        observation: Observation, state: LbBspCpuState
    ) -> tuple[np.ndarray, LbBspCpuState]:
        speed = mean_performance(observation)
        scale = np.where(np.isnan(state.scale), speed, state.scale)
        with np.errstate(over="ignore"):
            relative = speed / scale
        fresh = np.isnan(state.scale)
        # Broken clocks: a speed a million times the first says nothing.
        measured = (relative > 1e-6) & (relative < 1e6)
        relative = np.where(measured, relative, state.past[:, 0])
        state = LbBspCpuState(
            state.global_batch,
            scale,
            state.past,
            *_fitted(state, relative, measured & ~fresh, forgetting),
        )
        past = np.column_stack([relative, state.past[:, :-1]])
        # All that came before the first measure is like it.
        past = np.where(measured[:, None], past, state.past)
        state = LbBspCpuState(
            state.global_batch, scale, past, state.coefficients, state.inverse
        )
        predicted = (_inputs(past) * state.coefficients).sum(axis=1)
        last = past[:, 0]
        predicted = np.clip(predicted, last / _FURTHEST, last * _FURTHEST)
        return proportional(predicted * scale, state.global_batch), state

    return Policy("lb_bsp_cpu", init, update)


def _inputs(past: np.ndarray) -> np.ndarray:
    """What a prediction is made of: past speeds and 1, [W, order + 1]."""
    return np.column_stack([past, np.ones(len(past))])


def _fitted(
    state: LbBspCpuState, speed: np.ndarray, measured: np.ndarray, forgetting: float
) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients and inverse after one more speed of each worker."""
    inputs = _inputs(state.past)
    turned = np.einsum("wij,wj->wi", state.inverse, inputs)
    gain = turned / (forgetting + (inputs * turned).sum(axis=1))[:, None]
    error = speed - (inputs * state.coefficients).sum(axis=1)
    coefficients = state.coefficients + gain * error[:, None]
    inverse = (state.inverse - gain[:, :, None] * turned[:, None, :]) / forgetting
    # Where nothing new comes for long the inverse would grow without end.
    trace = np.trace(inverse, axis1=1, axis2=2)
    grown = np.maximum(trace / (len(inputs[0]) * 10.0 / _PRIOR), 1.0)
    inverse = inverse / grown[:, None, None]
    return (
        np.where(measured[:, None], coefficients, state.coefficients),
        np.where(measured[:, None, None], inverse, state.inverse),
    )

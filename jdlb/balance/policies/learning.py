"""What policies with a time model take from a round, and how they start.

Which of a round's numbers count as the measure of a worker; shared by `makespan`,
`boa` and `lbb`. Must not know what they do with the model.
"""

import numpy as np

from jdlb.balance.policies.protocol import (
    Observation,
    mean_seconds,
    median_seconds,
)
from jdlb.balance.time_model import TimeModel

# Steps of a round from which on its median can stand for the worker's state.
_STEPS_TO_CONFIRM = 5
# A mean this many times the median comes from a few stalled steps.
_STALLED = 1.5


def learn(model: TimeModel, observation: Observation) -> TimeModel:
    """The model after a round: the mean step counts, the median bears it out.

    A mean far from what is believed is a change of the worker if the median of at least
    five steps is as far, on the same side; else a few steps were disturbed, and the
    model waits for another such round. Where nothing is believed yet, or not at this
    batch, a mean that a few stalled steps have raised is replaced by the median.
    """
    capacities = np.array(observation.capacities, np.float64)
    mean, median = mean_seconds(observation), median_seconds(observation)
    median = np.where(np.isnan(median), mean, median)
    new = ~model.remembers(capacities)
    mean = np.where(new & (mean > _STALLED * median), median, mean)
    enough = np.array(observation.measured_steps) >= _STEPS_TO_CONFIRM
    return model.update(capacities, mean, witness=np.where(enough, median, np.nan))

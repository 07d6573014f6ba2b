"""Eight workers whose heterogeneity changes by a schedule of levels, as in OmniLearn.

    python -m experiments simulate levels

Levels 1, 2, 6, 3, 10 and 1, each for 20 rounds: the fastest worker has so many times
the speed of the slowest, and all together stay as fast. B = 1,024, 2 s for a program.
What to see: how quickly a rule follows a change that lasts.
"""

from jdlb.balance.simulation.disturbances import Levels
from jdlb.balance.simulation.scenario import Noise, Scenario, Worker
from jdlb.balance.time_tables import TimeTable


def scenario() -> Scenario:
    """120 rounds."""
    return Scenario(
        workers=(Worker(TimeTable.affine(0.01, 2e-3)),) * 8,
        global_batch=1024,
        rounds=120,
        steps=50,
        noise=Noise(step=0.05, round=0.01, stall_probability=0.001),
        disturbances=(Levels(((0, 1), (20, 2), (40, 6), (60, 3), (80, 10), (100, 1))),),
        compile_seconds=2.0,
    )

"""Four unlike workers with two hiccups: one step of 10 times, one round of 3 times.

    python -m experiments simulate hiccup

B = 256, 20 steps a round, 2 s for a new program. Worker 0 loses one step in round 15,
worker 1 a whole round in round 30. Neither lasts.
What to see: a rule that moves shares for either of them pays for it afterwards (the
column "worst regression").
"""

from jdlb.balance.simulation.disturbances import Hiccups, Hit
from jdlb.balance.simulation.scenario import Noise, Scenario, Worker
from jdlb.balance.time_tables import TimeTable


def scenario() -> Scenario:
    """45 rounds."""
    return Scenario(
        workers=tuple(
            Worker(TimeTable.affine(0.01, 2e-3 / speed)) for speed in (1, 1, 0.6, 0.3)
        ),
        global_batch=256,
        rounds=45,
        steps=20,
        noise=Noise(step=0.03, round=0.005),
        disturbances=(
            Hiccups((Hit(15, 0, 1, 10.0), Hit(30, 1, steps=20, factor=3.0))),
        ),
        compile_seconds=2.0,
    )

"""Three workers of speed 1, 1/2 and 1/4, with a little noise and nothing else.

    python -m experiments simulate steady

The simulated twin of the main job, `compare mnist5k`: B = 240, 21 steps a round, about
1.9 ms an example on the fastest worker, 5 ms of fixed cost, 2 s for a new program.
What to see: whether a rule comes to rest near the best, and what getting there costs.
"""

from jdlb.balance.simulation.scenario import Noise, Scenario, Worker
from jdlb.balance.time_tables import TimeTable


def scenario() -> Scenario:
    """60 rounds."""
    return Scenario(
        workers=tuple(
            Worker(TimeTable.affine(0.005, 0.0019 / speed)) for speed in (1, 0.5, 0.25)
        ),
        global_batch=240,
        rounds=60,
        steps=21,
        noise=Noise(step=0.05, round=0.01, stall_probability=0.005),
        compile_seconds=2.0,
    )

"""Four unlike workers: the fastest leaves, comes back, and then a slow fifth joins.

    python -m experiments simulate membership

B = 320 throughout, 30 steps a round, 3 s for a new program; the slow worker's memory
holds 96 examples. Every change starts the policy anew; programs of workers that stay
are kept.
What to see: what a start from nothing costs each rule.
"""

from jdlb.balance.simulation.scenario import Change, Noise, Scenario, Worker
from jdlb.balance.time_tables import TimeTable


def scenario() -> Scenario:
    """80 rounds."""
    speeds = (1, 0.6, 0.6, 0.4)
    known = tuple(Worker(TimeTable.affine(0.01, 2e-3 / speed)) for speed in speeds)
    return Scenario(
        workers=(*known, Worker(TimeTable.affine(0.02, 8e-3), cap=96)),
        global_batch=320,
        rounds=80,
        steps=30,
        noise=Noise(step=0.03, round=0.01),
        membership=(
            Change(20, 0, present=False),
            Change(40, 0, present=True),
            Change(60, 4, present=True),
        ),
        compile_seconds=3.0,
    )

"""A thousand workers of unlike speed, each slow now and then, for 200 rounds.

    python -m experiments simulate thousand

Speeds from 1 to 4 in a fixed order, B = 32,000, 20 steps a round, a ring of 5 us and
10 GB/s with 100 MB. Slowdowns: probability 0.002 a round, 4 to 20 rounds, 2 to 4 s a
round of some 1.6 s. 2 s for a program. Takes a few seconds a policy on one core.
What to see: the slowest of a thousand counts, so noise costs more than in a small
cluster, and a rule that moves somebody every round compiles every round.
"""

from jdlb.balance.simulation.disturbances import RandomSlowdowns
from jdlb.balance.simulation.scenario import Network, Noise, Scenario, Worker
from jdlb.balance.time_tables import TimeTable


def scenario() -> Scenario:
    """200 rounds."""
    # All of them differ, and neighbours do not resemble each other.
    speeds = [1 + 3 * (w * 619 % 1000) / 999 for w in range(1000)]
    return Scenario(
        workers=tuple(Worker(TimeTable.affine(0.005, 5e-3 / s)) for s in speeds),
        global_batch=32_000,
        rounds=200,
        steps=20,
        noise=Noise(step=0.02, round=0.005, stall_probability=1e-5),
        network=Network(5e-6, 10e9, 100e6),
        disturbances=(RandomSlowdowns(0.002, (4, 20), (2, 4)),),
        compile_seconds=2.0,
    )

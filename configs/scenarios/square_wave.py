"""Four like workers, one of which is three times slower for 10 of every 20 rounds.

    python -m experiments simulate square_wave

B = 256, 40 steps a round, 2 s for a new program: what another tenant does to a machine.
What to see: how many rounds each of the edges costs, up and down.
"""

from jdlb.balance.simulation.disturbances import SquareWave
from jdlb.balance.simulation.scenario import Noise, Scenario, Worker
from jdlb.balance.time_tables import TimeTable


def scenario() -> Scenario:
    """100 rounds, the first ten of them calm."""
    return Scenario(
        workers=(Worker(TimeTable.affine(0.01, 2e-3)),) * 4,
        global_batch=256,
        rounds=100,
        steps=40,
        noise=Noise(step=0.05, round=0.01, stall_probability=0.001),
        disturbances=(SquareWave(workers=(1,), factor=3, half_period=10, first=10),),
        compile_seconds=2.0,
    )

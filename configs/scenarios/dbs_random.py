"""Four workers, one three times as fast, under the random slowdowns of DBS.

    python -m experiments simulate dbs_random

The cluster of DBS in kind: three workers share a GPU, a fourth has one alone; B = 512,
98 steps a round, some 25 s a round when balanced. Each round each worker becomes slow,
with probability 0.1, for 4 to 20 rounds by 5 to 10 s a round. 1 ms latency of the
ring, 170 MB of gradients at 10 GB/s; 5 s for a new program.
What to see: a rule must follow, and not pay more for it than it gains.
"""

from jdlb.balance.simulation.disturbances import RandomSlowdowns
from jdlb.balance.simulation.scenario import Network, Noise, Scenario, Worker
from jdlb.balance.time_tables import TimeTable


def scenario() -> Scenario:
    """100 rounds, as many as DBS trains."""
    return Scenario(
        workers=tuple(
            Worker(TimeTable.affine(0.01, example))
            for example in (3e-3, 3e-3, 3e-3, 1e-3)
        ),
        global_batch=512,
        rounds=100,
        steps=98,
        noise=Noise(step=0.03, round=0.01, stall_probability=0.001),
        network=Network(latency_seconds=0.001, bytes_per_second=10e9, bytes=170e6),
        disturbances=(RandomSlowdowns(),),
        compile_seconds=5.0,
    )

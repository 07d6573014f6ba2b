"""Two GTX 1070, a Tesla M40 and a GTX 750 with the times published with LBB.

    python -m experiments simulate gpu_tables

B = 512, 98 steps a round (CIFAR-10), no noise, nothing to pay for a new capacity. Times
are flat below 8 examples, then linear. The exact best, with whole sizes: shares
172/171/151/18, 185.1 ms a step. LBB published shares 167/167/158/20 for its own
network, from 392.9 to 104.9 ms there; they take 198.6 ms on these tables.
What to see: in how many rounds a rule comes within 5 %, and how near it ends.
"""

from jdlb.balance.simulation.scenario import Scenario, Worker
from jdlb.balance.time_tables import GTX_750, GTX_1070, TESLA_M40


def scenario() -> Scenario:
    """40 rounds; every size may be compiled."""
    return Scenario(
        workers=tuple(map(Worker, (GTX_1070, GTX_1070, TESLA_M40, GTX_750))),
        global_batch=512,
        rounds=40,
        steps=98,
        granule=1,
        growth=0.0,
    )

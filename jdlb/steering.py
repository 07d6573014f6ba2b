"""The allocation in force: decided by the lead, adopted by every process.

Carries observations to the controller and its whole numbers to all. Knows no step and
no program: when the pipeline is drained, and what a failure was, the trainer says. Used
by `trainer` alone.
"""

from collections.abc import Sequence

import numpy as np

from jdlb.agreement import name_workers
from jdlb.balance import policies
from jdlb.balance.allocation import Allocation
from jdlb.balance.controller import Controller
from jdlb.balance.policies.protocol import AnyPolicy, Cluster, Observation
from jdlb.engine.exchange import Exchange
from jdlb.errors import RunError, UserError


def controller_of(
    policy: str | AnyPolicy,
    cluster: Cluster,
    workers: int,
    global_batch: int,
    *,
    aligned: bool,
    dead_band: float,
    dry_run: bool,
) -> Controller:
    """The controller of a policy, given by itself or by its name.

    Raises:
      UserError: an unknown name, or a cluster that is not for these `workers` and
        this `global_batch`.
    """
    if (cluster.workers, cluster.global_batch) != (workers, global_batch):
        raise UserError(
            f"the cluster is for {cluster.workers} workers and a global batch of "
            f"{cluster.global_batch}, the run has {workers} and {global_batch}: make "
            "one alike"
        )
    if isinstance(policy, str):
        policy = policies.get(policy)
    return Controller(policy, cluster, aligned, dead_band=dead_band, dry_run=dry_run)


class Steering:
    """One allocation at a time, the same on all processes."""

    def __init__(self, controller: Controller, exchange: Exchange, leads: bool):
        """Begin with what the policy gives before anything was measured.

        Args:
          controller: the same on all processes.
          exchange: over the workers of the job.
          leads: whether this process decides.
        """
        self._controller = controller
        self._exchange = exchange
        self._leads = leads
        decision, self._control = controller.start()
        self.allocation: Allocation = decision.allocation
        # The lead's, also where another process was given another policy.
        self._adopt(decision.allocation.sizes)

    @property
    def policy(self) -> str:
        """Its name."""
        return self._controller.policy.name

    def decide(self, observation: Observation, steps_left: int | None) -> str:
        """Take what the round was like into the next allocation; the reason.

        `steps_left` are the steps that the run still has, where that is known.
        """
        if not self._leads:
            self._adopt(self.allocation.sizes)
            return "decided by the lead"
        decision, self._control = self._controller.decide(
            observation, self._control, steps_left
        )
        self._adopt(decision.allocation.sizes)
        return decision.reason

    def back_off(self, failed: Sequence[int]) -> None:
        """Lower the caps of workers that ran out of memory, and share out again.

        A cap goes to the next lower edge of the ladder; below the lowest it halves.

        Raises:
          RunError: a worker fails with one example, or the caps leave no room.
        """
        cluster = self._controller.cluster
        caps = list(cluster.limits.caps)
        for w in failed:
            capacity = self.allocation.capacities[w]
            lower = [edge for edge in cluster.ladder.edges if edge < capacity]
            caps[w] = lower[-1] if lower else capacity // 2
            if not caps[w]:
                raise RunError(
                    f"{name_workers([w])} ran out of memory with one example: run "
                    "without this worker, or with a smaller model"
                )
        try:
            self._controller = self._controller.with_caps(caps)
        except UserError as error:
            raise RunError(
                f"{name_workers(failed)} ran out of memory, and there is no room for "
                f"the examples elsewhere ({error})"
            ) from error
        sizes = self.allocation.sizes
        if self._leads:
            decision, self._control = self._controller.reallocate(self._control)
            sizes = decision.allocation.sizes
        self._adopt(sizes)

    def _adopt(self, sizes: Sequence[int]) -> None:
        """Take over the lead's sizes; what the other processes pass is not looked at."""
        agreed = self._exchange.from_lead(np.array(sizes, np.int32)).tolist()
        self.allocation = self._controller.allocation_of(agreed)

"""One decision a round: observation -> policy -> limits -> the next allocation.

Joins the policy (real-valued targets) and the allocation (whole examples on a ladder),
and says in one line what it did and why. Must not know how times were measured or who
carries the decision to the workers. Runs on one process only: floats on unlike machines
may differ in the last bit, so whole numbers are sent, never computed twice.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdlb.balance.allocation import Allocation, allocate
from jdlb.balance.policies.protocol import (
    AnyPolicy,
    Cluster,
    Observation,
    mean_performance,
)
from jdlb.errors import UserError


@dataclass(frozen=True)
class Decision:
    """What holds from the next round on.

    Attributes:
      allocation: in force from now on.
      changed: some worker's size differs from what it was.
      reason: one line for people.
      proposed: sizes [W] that the policy asks for; they differ from those in force in a
        dry run and inside the dead band.
    """

    allocation: Allocation
    changed: bool
    reason: str
    proposed: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ControllerState:
    """What one decision leaves for the next."""

    policy_state: Any
    targets: np.ndarray
    allocation: Allocation


@dataclass(frozen=True)
class Controller:
    """Decides once a round.

    Attributes:
      policy: names the targets.
      cluster: number of workers, global batch, ladder, limits.
      aligned: sizes on ladder edges but for one worker; else exactly as rounded.
      dead_band: nothing moves unless some worker's size would change by more than
        this fraction of it; 0 for none.
      dry_run: decisions are made and told, but the first allocation stays.

    Raises:
      UserError: a dead band outside [0, 1).
    """

    policy: AnyPolicy
    cluster: Cluster
    aligned: bool = True
    dead_band: float = 0.0
    dry_run: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.dead_band < 1:
            raise UserError(
                f"dead band {self.dead_band}: use a fraction of a worker's share, "
                "from 0 to below 1"
            )

    def start(self) -> tuple[Decision, ControllerState]:
        """The allocation before anything was seen."""
        targets, policy_state = self.policy.init(self.cluster)
        allocation = self._allocate(targets)
        reason = f"start: what {self.policy.name} gives before anything was measured"
        decision = Decision(allocation, False, reason, allocation.sizes)
        return decision, ControllerState(policy_state, targets, allocation)

    def decide(
        self, observation: Observation, state: ControllerState
    ) -> tuple[Decision, ControllerState]:
        """The next allocation, from what the last round was like."""
        targets, policy_state = self.policy.update(observation, state.policy_state)
        current, proposed = state.allocation, self._allocate(targets)
        move = _largest_move(current.sizes, proposed.sizes)
        if not self._allows(current):
            allocation = proposed
            reason = f"{_moves(current, proposed)}; a size was above its cap"
        elif proposed.sizes == current.sizes:
            allocation, reason = current, "kept: the policy asks for the same sizes"
        elif move <= self.dead_band:
            allocation = current
            reason = (
                f"kept: largest move {_percent(move)} is inside the dead band of "
                f"{_percent(self.dead_band)}"
            )
        else:
            told = _moves(current, proposed) + _prediction(observation, proposed)
            allocation = current if self.dry_run else proposed
            reason = f"dry run, kept: {told}" if self.dry_run else told
        decision = Decision(
            allocation, allocation.sizes != current.sizes, reason, proposed.sizes
        )
        return decision, ControllerState(policy_state, targets, allocation)

    def with_caps(self, caps: Iterable[int]) -> "Controller":
        """The same controller under other memory caps [W], in examples.

        `reallocate` makes them hold before the next round.

        Raises:
          UserError: another number of caps than workers, or too low for the batch.
        """
        limits = self.cluster.limits.with_caps(caps)
        cluster = dataclasses.replace(self.cluster, limits=limits)
        return dataclasses.replace(self, cluster=cluster)

    def reallocate(self, state: ControllerState) -> tuple[Decision, ControllerState]:
        """The last targets again, under caps that changed in mid-round.

        Neither a dead band nor a dry run holds back what a memory cap asks for.
        """
        current, proposed = state.allocation, self._allocate(state.targets)
        changed = proposed.sizes != current.sizes
        reason = (
            f"{_moves(current, proposed)}; caps are now {self.cluster.limits.caps}"
            if changed
            else "kept: all sizes are within the new caps"
        )
        decision = Decision(proposed, changed, reason, proposed.sizes)
        return decision, dataclasses.replace(state, allocation=proposed)

    def _allocate(self, targets: np.ndarray) -> Allocation:
        cluster = self.cluster
        return allocate(
            targets, cluster.global_batch, cluster.ladder, cluster.limits, self.aligned
        )

    def _allows(self, allocation: Allocation) -> bool:
        caps = self.cluster.limits.caps
        return all(c <= cap for c, cap in zip(allocation.capacities, caps, strict=True))


def _largest_move(old: tuple[int, ...], new: tuple[int, ...]) -> float:
    """The largest change of a size, as a fraction of it."""
    return max(abs(b - a) / max(a, 1) for a, b in zip(old, new, strict=True))


def _moves(old: Allocation, new: Allocation) -> str:
    """The largest move in examples, and how many workers move beside it."""
    moves = [abs(b - a) for a, b in zip(old.sizes, new.sizes, strict=True)]
    w = moves.index(max(moves))
    others = sum(move > 0 for move in moves) - 1
    beside = f" and {others} more" if others > 0 else ""
    return f"shares moved: worker {w} {old.sizes[w]} -> {new.sizes[w]}{beside}"


def _prediction(observation: Observation, new: Allocation) -> str:
    """Makespan as it was and as it would be, each worker as fast as it was."""
    performance = mean_performance(observation)
    known = ~np.isnan(performance)
    if not known.any():
        return ""
    was = np.max(np.array(observation.capacities)[known] / performance[known])
    will = np.max(np.array(new.capacities)[known] / performance[known])
    return f"; predicted makespan {was:.3g} s -> {will:.3g} s"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %"

"""One decision a round: observation -> policy -> limits -> the next allocation.

Joins the policy (real-valued targets) and the allocation (whole examples on a ladder),
and says in one line what it did and why. Must not know how times were measured or who
carries the decision to the workers. Runs on one process only: floats on unlike machines
may differ in the last bit, so whole numbers are sent, never computed twice.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdlb.balance.allocation import Allocation, allocate, padded, round_shares
from jdlb.balance.ladder import Ladder, Limits
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
    # (worker, capacity) of every program that was compiled.
    compiled: frozenset[tuple[int, int]] = frozenset()
    # What a program took to compile, the last time that each worker told; [W] or empty.
    program_seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Controller:
    """Decides once a round.

    Attributes:
      policy: names the targets.
      cluster: number of workers, global batch, ladder, limits.
      aligned: sizes on ladder edges but for one worker; else exactly as rounded.
      dead_band: nothing moves unless some worker's size would change by more than
        this fraction of it; 0 for none.
      weigh_compilation: where the length of the run is known, nothing moves to new
        programs that take longer to compile than the run would gain by them.
      dry_run: decisions are made and told, but the first allocation stays.

    Raises:
      UserError: a dead band outside [0, 1).
    """

    policy: AnyPolicy
    cluster: Cluster
    aligned: bool = True
    dead_band: float = 0.0
    weigh_compilation: bool = True
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
        self,
        observation: Observation,
        state: ControllerState,
        steps_left: int | None = None,
    ) -> tuple[Decision, ControllerState]:
        """The next allocation, from what the last round was like.

        `steps_left` are the steps that the run still has; None where nobody knows, and
        a new program always pays.
        """
        observation = dataclasses.replace(observation, limits=self._limits)
        targets, policy_state = self.policy.update(observation, state.policy_state)
        state = dataclasses.replace(
            _with_programs(state, observation),
            policy_state=policy_state,
            targets=targets,
        )
        current, proposed = state.allocation, self._allocate(targets)
        if not self._allows(current):
            allocation = proposed
            told = _moves(current, proposed)
            reason = f"shares moved: {told}; a size was above its cap"
        elif proposed.sizes == current.sizes:
            allocation, reason = current, "kept: the policy asks for the same sizes"
        elif against := self._against(observation, state, proposed, steps_left):
            allocation, reason = current, f"kept: {against}"
        else:
            told = f"shares moved: {_moves(current, proposed)}"
            told += _prediction(observation, proposed)
            allocation = current if self.dry_run else proposed
            reason = f"dry run, kept: {told}" if self.dry_run else told
        changed = allocation.sizes != current.sizes
        decision = Decision(allocation, changed, reason, proposed.sizes)
        return decision, dataclasses.replace(state, allocation=allocation)

    def allocation_of(self, sizes: Sequence[int]) -> Allocation:
        """Given sizes [W] with the capacities that they run at under this policy."""
        if self.policy.exact:
            # A worker without rows still runs a program of one.
            return Allocation(tuple(sizes), tuple(max(size, 1) for size in sizes))
        return padded(sizes, self._ladder, self._limits)

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
            f"shares moved: {_moves(current, proposed)}; caps are now {self._limits.caps}"
            if changed
            else "kept: all sizes are within the new caps"
        )
        decision = Decision(proposed, changed, reason, proposed.sizes)
        return decision, dataclasses.replace(state, allocation=proposed)

    @functools.cached_property
    def _ladder(self) -> Ladder:
        """The capacities there are: multiples of the one compiled size, if it is one."""
        unit, batch = self.policy.micro_batch, self.cluster.global_batch
        return self.cluster.ladder if unit is None else Ladder(unit, 0.0, top=batch)

    @functools.cached_property
    def _limits(self) -> Limits:
        """Floors and caps; caps in whole micro-batches where these are compiled.

        Raises:
          UserError: a cap below one micro-batch.
        """
        unit, limits = self.policy.micro_batch, self.cluster.limits
        if unit is None:
            return limits
        lowest = min(limits.caps)
        if lowest < unit:
            raise UserError(
                f"micro-batches of {unit} are above the cap of {lowest} of worker "
                f"{limits.caps.index(lowest)}: use smaller ones"
            )
        return limits.with_caps(cap // unit * unit for cap in limits.caps)

    def _allocate(self, targets: np.ndarray) -> Allocation:
        policy, total, limits = self.policy, self.cluster.global_batch, self._limits
        if policy.exact or (policy.placed and _placed(targets, total, limits)):
            return self.allocation_of(round_shares(targets, total, limits))
        aligned = self.aligned or policy.micro_batch is not None
        return allocate(targets, total, self._ladder, limits, aligned)

    def _against(
        self,
        observation: Observation,
        state: ControllerState,
        proposed: Allocation,
        steps_left: int | None,
    ) -> str:
        """What speaks against a move; nothing is the empty string."""
        current = state.allocation
        move = _largest_move(current.sizes, proposed.sizes)
        if move <= self.dead_band:
            return (
                f"largest move {_percent(move)} is inside the dead band of "
                f"{_percent(self.dead_band)}"
            )
        if not self.weigh_compilation or steps_left is None:
            return ""
        cost = _compile_seconds(state, proposed)
        makespans = _makespans(observation, proposed) if cost else None
        if makespans is None:
            return ""
        was, will = makespans
        saved = (was - will) * steps_left
        if saved <= cost:
            return (
                f"{_moves(current, proposed)} would save {max(saved, 0.0):.2g} s of "
                f"the rest of the run and cost {cost:.2g} s of compilation"
            )
        return ""

    def _allows(self, allocation: Allocation) -> bool:
        return bool(np.all(np.less_equal(allocation.capacities, self._limits.caps)))


def _placed(targets: np.ndarray, total: int, limits: Limits) -> bool:
    """Whether targets are whole sizes that can be had as they stand."""
    return bool(
        np.all(targets == np.round(targets))
        and targets.sum() == total
        and np.all((limits.floors <= targets) & (targets <= limits.caps))
    )


def _largest_move(old: tuple[int, ...], new: tuple[int, ...]) -> float:
    """The largest change of a size, as a fraction of it."""
    return float(np.max(np.abs(np.subtract(new, old)) / np.maximum(old, 1)))


def _moves(old: Allocation, new: Allocation) -> str:
    """The largest move in examples, and how many workers move beside it."""
    moves = np.abs(np.subtract(new.sizes, old.sizes))
    w = int(np.argmax(moves))
    others = np.count_nonzero(moves) - 1
    beside = f" and {others} more" if others > 0 else ""
    return f"worker {w} {old.sizes[w]} -> {new.sizes[w]}{beside}"


def _makespans(observation: Observation, new: Allocation) -> tuple[float, float] | None:
    """Makespan as it was and as it would be, each worker as fast as it was; seconds.

    None where no worker was measured.
    """
    performance = mean_performance(observation)
    known = ~np.isnan(performance)
    if not known.any():
        return None
    was = np.max(np.array(observation.capacities)[known] / performance[known])
    will = np.max(np.array(new.capacities)[known] / performance[known])
    return float(was), float(will)


def _prediction(observation: Observation, new: Allocation) -> str:
    makespans = _makespans(observation, new)
    if makespans is None:
        return ""
    was, will = makespans
    return f"; predicted makespan {was:.3g} s -> {will:.3g} s"


def _programs(capacities: Sequence[int]) -> frozenset[tuple[int, int]]:
    return frozenset(enumerate(capacities))


def _with_programs(state: ControllerState, observation: Observation) -> ControllerState:
    """The state after a round that ran, and maybe compiled, these programs."""
    made, took = observation.compilations, observation.compile_seconds
    seconds = state.program_seconds
    if any(made) and took:
        known = seconds or (0.0,) * len(made)
        seconds = tuple(
            t / n if n else k for n, t, k in zip(made, took, known, strict=True)
        )
    ran = _programs(observation.capacities)
    compiled = state.compiled if ran <= state.compiled else state.compiled | ran
    return dataclasses.replace(state, compiled=compiled, program_seconds=seconds)


def _compile_seconds(state: ControllerState, new: Allocation) -> float:
    """How long all wait for the programs that `new` needs: the slowest compiler."""
    if not state.program_seconds:
        return 0.0
    missing = _programs(new.capacities) - state.compiled
    return max((state.program_seconds[w] for w, _ in missing), default=0.0)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %"

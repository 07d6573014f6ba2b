"""One policy in one world: rounds as the trainer runs them, in simulated seconds.

The real controller decides from the same observations that a training job makes: sums,
medians and spreads over measured steps, the first step of a new program left out.
Must not know which policy it drives.

When a worker leaves or joins, policy and controller start anew for the workers that are
there, as a job that is started again would: what was learned of speeds is lost, also of
those that stay. Their compiled programs are not.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jdlb.balance.allocation import Allocation
from jdlb.balance.controller import Controller, ControllerState
from jdlb.balance.policies.protocol import AnyPolicy, Observation
from jdlb.balance.simulation.world import World

# From the shares [M] that suit the workers best while nothing disturbs them, for the
# policies whose user gives them.
PolicyMaker = Callable[[Sequence[float]], AnyPolicy]

PROBE_STEPS = 10
"""Steps of a probe of all workers at once, as in the trainer."""


@dataclass(frozen=True, eq=False)
class SimulatedRound:
    """One round. Arrays have an entry for every worker of the scenario; 0 if absent.

    Attributes:
      seconds: all of it: steps, all-reduce, compilation, a probe before it.
      step_seconds: mean of its steps, all-reduce included, compilation not.
      busy_seconds: sum over its steps, [W].
      compile_seconds: how long all waited for new programs.
      probe_seconds: steps of a probe before this round.
      compilations: new programs, over all workers.
      micro_batch: examples of the one compiled size, where the policy has one.
      rebalanced: the decision at its end moved some share.
    """

    round: int
    sizes: np.ndarray
    capacities: np.ndarray
    busy_seconds: np.ndarray
    step_seconds: float
    compile_seconds: float
    probe_seconds: float
    seconds: float
    compilations: int
    micro_batch: int | None
    rebalanced: bool
    reason: str


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """All rounds of one policy in one world."""

    policy: str
    world: World
    rounds: tuple[SimulatedRound, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the whole run."""
        return sum(r.seconds for r in self.rounds)


def simulate(world: World, name: str, make_policy: PolicyMaker) -> SimulatedRun:
    """Run the scenario of `world` under the policy that `make_policy` makes.

    Raises:
      UserError: the policy does not fit the workers.
    """
    programs = _Programs(world.scenario.compile_seconds)
    rounds: list[SimulatedRound] = []
    for numbers, members in world.segments():
        rounds += _Segment(world, programs, make_policy, numbers, members).run()
    return SimulatedRun(name, world, tuple(rounds))


class _Programs:
    """Which worker has which programs, by their size in examples."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._of: dict[int, set[int]] = {}

    def add(self, workers: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """Compile what is missing; which workers [M] had to."""
        fresh = []
        for worker, size in zip(workers.tolist(), sizes, strict=True):
            known = self._of.setdefault(worker, set())
            fresh.append(size not in known)
            known.add(size)
        return np.array(fresh)

    def told_to(self, state: ControllerState, workers: np.ndarray) -> ControllerState:
        """The state of a new controller that knows of these programs."""
        known = [self._of.get(worker, set()) for worker in workers.tolist()]
        if not any(known):
            return state
        return dataclasses.replace(
            state,
            compiled=frozenset((i, c) for i, sizes in enumerate(known) for c in sizes),
            program_seconds=tuple(self._seconds if sizes else 0.0 for sizes in known),
        )


class _Segment:
    """Rounds in a row with the same workers, under one controller."""

    def __init__(
        self,
        world: World,
        programs: _Programs,
        make_policy: PolicyMaker,
        numbers: range,
        members: np.ndarray,
    ):
        self._world, self._programs = world, programs
        self._numbers, self._members = numbers, members
        scenario = world.scenario
        cluster = scenario.cluster(world.present[numbers.start])
        best = world.calm(members).best(cluster.global_batch, cluster.limits)
        self._policy = make_policy((best.sizes / cluster.global_batch).tolist())
        self._controller = Controller(
            self._policy,
            cluster,
            aligned=scenario.aligned,
            dead_band=scenario.dead_band,
        )

    def run(self) -> list[SimulatedRound]:
        """All its rounds."""
        first, scenario = self._numbers.start, self._world.scenario
        decision, state = self._controller.start()
        state = self._programs.told_to(state, self._members)
        probe_seconds, probe_fresh = 0.0, None
        if self._policy.probe:
            allocation = decision.allocation
            probe_fresh = self._compile(allocation)
            busy = self._world.probe(
                first, PROBE_STEPS, np.array(allocation.capacities), self._unit
            )
            steps = busy.max(axis=1) + self._world.network_seconds(first)
            probe_seconds = float(steps.sum())
            seen = self._observation(first, allocation, busy, steps, probe_fresh)
            left = (scenario.rounds - first) * scenario.steps
            decision, state = self._controller.decide(seen, state, left)
        rounds = []
        for r in self._numbers:
            allocation = decision.allocation
            fresh = self._compile(allocation)
            busy = self._world.busy(r, np.array(allocation.capacities), self._unit)
            steps = busy.max(axis=1) + self._world.network_seconds(r)
            seen = self._observation(r, allocation, busy, steps, fresh)
            left = (scenario.rounds - r - 1) * scenario.steps
            decision, state = self._controller.decide(seen, state, left)
            made = self._round(r, allocation, busy, steps, fresh)
            rounds.append(
                dataclasses.replace(
                    made, rebalanced=decision.changed, reason=decision.reason
                )
            )
        if probe_fresh is not None:
            rounds[0] = self._with_probe(rounds[0], probe_seconds, probe_fresh)
        return rounds

    @property
    def _unit(self) -> int | None:
        return self._policy.micro_batch

    def _compile(self, allocation: Allocation) -> np.ndarray:
        """Compile what the allocation lacks; which workers [M] had to."""
        sizes = allocation.capacities
        if self._unit is not None:
            sizes = (self._unit,) * len(sizes)
        return self._programs.add(self._members, sizes)

    def _observation(
        self,
        round: int,
        allocation: Allocation,
        busy: np.ndarray,
        steps: np.ndarray,
        fresh: np.ndarray,
    ) -> Observation:
        """What a training job would have seen of these steps."""
        count = len(steps)
        later = busy[1:] if count > 1 else np.zeros((1, busy.shape[1]))
        low, median, high = np.percentile(busy, [25, 50, 75], axis=0)
        if fresh.any():
            of_fresh = np.percentile(later[:, fresh], [25, 50, 75], axis=0)
            low[fresh], median[fresh], high[fresh] = of_fresh
        busy_sum = np.where(fresh, later.sum(axis=0), busy.sum(axis=0))
        step_sum = np.where(fresh, steps[1:].sum(), steps.sum())
        compile_seconds = self._world.scenario.compile_seconds * fresh
        return Observation(
            round=round,
            sizes=allocation.sizes,
            capacities=allocation.capacities,
            busy_seconds=tuple(busy_sum.tolist()),
            busy_median_seconds=tuple(median.tolist()),
            busy_spread_seconds=tuple((high - low).tolist()),
            input_seconds=(0.0,) * len(fresh),
            wait_seconds=tuple((step_sum - busy_sum).tolist()),
            measured_steps=tuple((count - fresh.astype(np.int64)).tolist()),
            compilations=tuple(fresh.astype(np.int64).tolist()),
            compile_seconds=tuple(compile_seconds.tolist()),
        )

    def _round(
        self,
        round: int,
        allocation: Allocation,
        busy: np.ndarray,
        steps: np.ndarray,
        fresh: np.ndarray,
    ) -> SimulatedRound:
        compile_seconds = self._world.scenario.compile_seconds * bool(fresh.any())
        return SimulatedRound(
            round=round,
            sizes=self._of_all(np.array(allocation.sizes)),
            capacities=self._of_all(np.array(allocation.capacities)),
            busy_seconds=self._of_all(busy.sum(axis=0)),
            step_seconds=float(steps.mean()),
            compile_seconds=compile_seconds,
            probe_seconds=0.0,
            seconds=float(steps.sum()) + compile_seconds,
            compilations=int(fresh.sum()),
            micro_batch=self._unit,
            rebalanced=False,
            reason="",
        )

    def _with_probe(
        self, first: SimulatedRound, seconds: float, fresh: np.ndarray
    ) -> SimulatedRound:
        """The first round with the cost of the probe before it."""
        compile_seconds = self._world.scenario.compile_seconds * bool(fresh.any())
        return dataclasses.replace(
            first,
            probe_seconds=seconds,
            compile_seconds=first.compile_seconds + compile_seconds,
            seconds=first.seconds + seconds + compile_seconds,
            compilations=first.compilations + int(fresh.sum()),
        )

    def _of_all(self, values: np.ndarray) -> np.ndarray:
        """An array [M] with zeros for the workers that are not there: [W]."""
        full = np.zeros(len(self._world.scenario.workers), values.dtype)
        full[self._members] = values
        return full

"""What is simulated: workers with true times, their network, and what happens to them.

Plain frozen values, checked when they are made. Must not know any policy.
"""

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np

from jdlb.balance.policies.protocol import Cluster
from jdlb.balance.simulation.disturbances import Disturbance, Plan
from jdlb.balance.time_tables import TimeTable
from jdlb.errors import UserError


@dataclass(frozen=True)
class Worker:
    """One worker: its true step times, and the most examples that its memory holds."""

    table: TimeTable
    cap: int | None = None


@dataclass(frozen=True)
class Noise:
    """What times are multiplied with: around 1, skewed, and now and then far off.

    Attributes:
      step: standard deviation of the logarithm, drawn anew for each step.
      round: the same, drawn once a round: it does not average out within one.
      stall_probability: how likely a step is stalled.
      stall_shape: a stalled step takes `x` times as long with a probability that falls
        as `x ** -stall_shape` (Pareto): the smaller, the heavier the tail.
    """

    step: float = 0.0
    round: float = 0.0
    stall_probability: float = 0.0
    stall_shape: float = 2.5

    def __post_init__(self) -> None:
        if not (0 <= self.step < math.inf and 0 <= self.round < math.inf):
            raise UserError(f"{self}: deviations must be finite and at least 0")
        if not (0 <= self.stall_probability < 1 and self.stall_shape > 1):
            raise UserError(f"{self}: use a probability below 1 and a shape above 1")


@dataclass(frozen=True)
class Network:
    """A ring all-reduce: latency in seconds, bandwidth in bytes/s, bytes reduced."""

    latency_seconds: float = 0.0
    bytes_per_second: float = 1e9
    bytes: float = 0.0

    def __post_init__(self) -> None:
        if min(self.latency_seconds, self.bytes) < 0 or not self.bytes_per_second > 0:
            raise UserError(
                f"{self}: use a latency and bytes of at least 0 and a bandwidth above 0"
            )

    def seconds(self, workers: int) -> float:
        """Seconds of one all-reduce over a ring: 2 (W - 1) rounds of 1/W of the bytes.

        >>> Network(1e-3, 1e9, 4e9).seconds(4)
        6.006
        """
        turns = 2 * (workers - 1)
        part = self.bytes / workers
        return turns * (self.latency_seconds + part / self.bytes_per_second)


@dataclass(frozen=True)
class Change:
    """From the beginning of `round` on a worker is there, or is not."""

    round: int
    worker: int
    present: bool


@dataclass(frozen=True)
class Scenario:
    """A run to simulate. The global batch is constant, whoever joins or leaves.

    Attributes:
      workers: all that are ever there. One whose first change is to be present
        begins absent.
      steps: optimizer steps a round, all with whole batches.
      compile_seconds: of a capacity that a worker did not run before; the first round
        needs some, too.

    Raises:
      UserError: a number out of range; workers that cannot take the batch.
    """

    workers: tuple[Worker, ...]
    global_batch: int
    rounds: int = 60
    steps: int = 20
    noise: Noise = field(default=Noise())
    network: Network = field(default=Network())
    disturbances: tuple[Disturbance, ...] = ()
    membership: tuple[Change, ...] = ()
    compile_seconds: float = 0.0
    granule: int | None = None
    growth: float = 1 / 16
    aligned: bool = True
    dead_band: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("steps", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} {getattr(self, name)}: use {least} or more")
        if not 0 <= self.compile_seconds < math.inf:
            raise UserError(f"compile_seconds {self.compile_seconds}: use at least 0")
        if not self.workers:
            raise UserError("a scenario without workers: use at least 1")
        for change in self.membership:
            if not (change.round >= 0 and 0 <= change.worker < len(self.workers)):
                raise UserError(
                    f"{change}: use a round of at least 0 and one of the "
                    f"{len(self.workers)} workers"
                )
        self.plan()
        for row in np.unique(self.present(), axis=0):
            self.cluster(row)

    def present(self) -> np.ndarray:
        """Who is there: bool [R, W]."""
        there = np.ones((self.rounds, len(self.workers)), bool)
        seen: set[int] = set()
        for change in sorted(self.membership, key=lambda c: c.round):
            if change.present and change.worker not in seen:
                there[: change.round, change.worker] = False
            seen.add(change.worker)
            there[change.round :, change.worker] = change.present
        return there

    def cluster(self, present: np.ndarray) -> Cluster:
        """What the controller is told, of the workers [W] that are there.

        Raises:
          UserError: they cannot take the global batch, or nobody is there.
        """
        there = [
            w for w, is_there in zip(self.workers, present, strict=True) if is_there
        ]
        caps = tuple(self.global_batch if w.cap is None else w.cap for w in there)
        return Cluster.create(
            len(there),
            self.global_batch,
            granule=self.granule,
            growth=self.growth,
            caps=caps,
        )

    def plan(self) -> Plan:
        """All disturbances together."""
        shape = (self.rounds, len(self.workers))
        plans = [
            disturbance.plan(*shape, self.seed, stream)
            for stream, disturbance in enumerate(self.disturbances, start=1)
        ]
        return Plan.joined(plans, *shape)

    def resized(self, workers: int) -> "Scenario":
        """The same with another number of workers: these ones, over and over.

        The global batch grows or shrinks with them.

        Raises:
          UserError: fewer than one, or a disturbed worker is not among them.
        """
        if workers < 1:
            raise UserError(f"--workers {workers}: use 1 or more")
        count = len(self.workers)
        return dataclasses.replace(
            self,
            workers=tuple(self.workers[w % count] for w in range(workers)),
            global_batch=max(1, round(self.global_batch * workers / count)),
        )

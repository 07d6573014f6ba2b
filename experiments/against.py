"""`simulate --against`: what the simulator predicts of a real comparison, beside it.

Nothing is predicted from itself. For each policy the workers' true times are fitted to
what was measured *elsewhere*: the workers alone, the rounds of the other policies, and
its own rounds before those that are predicted. Then the simulator drives the real
policy from its first round on, so its shares are predicted as well, and the epochs that
`compare` counts (from the third on) are set against each other, compilation left out:
how long that takes depends on the machine's disk and cores, not on shares.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.config import Config, from_json
from experiments.simulate import SimulateOptions, make_policy
from jdlb.balance.simulation.fit import fitted_table
from jdlb.balance.simulation.scenario import Network, Scenario, Worker
from jdlb.balance.simulation.simulator import simulate
from jdlb.balance.simulation.world import World
from jdlb.errors import UserError
from jdlb.records import RoundRecord, RunHeader
from jdlb.report.summary import (
    Comparison,
    counted_epochs,
    of_kind,
    read_comparison,
)
from jdlb.report.tables import per_worker

TOLERANCE = 0.15
"""What the simulator should be within."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of an epoch of one policy, compilation left out, medians; and sizes."""

    policy: str
    predicted_seconds: float
    measured_seconds: float
    predicted_sizes: tuple[int, ...]
    measured_sizes: tuple[int, ...]

    @property
    def error(self) -> float:
        """How far the prediction is off, as a fraction of what was measured."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True)
class Evidence:
    """What a prediction is made from: (worker, capacity, mean busy seconds a step)."""

    points: tuple[tuple[int, int, float], ...]
    # Waiting seconds a step of the worker that waited least: what nobody can avoid.
    network_seconds: tuple[float, ...]
    # Of each round that compiled.
    compile_seconds: tuple[float, ...]


def check_alone(names: Sequence[str], options: SimulateOptions) -> None:
    """Nothing else can be asked for with `--against`.

    Raises:
      UserError: it is.
    """
    plain = dataclasses.replace(options, against=None, json=False)
    if names or plain != SimulateOptions():
        raise UserError(
            "--against predicts the runs of a folder as they were: give it no scenario "
            "and no other flag but --json"
        )


def predict_all(folder: Path, as_json: bool) -> None:
    """Print what is predicted and what was measured, for every policy of a folder.

    Raises:
      UserError: no comparison there, or too little in it.
    """
    comparison = read_comparison(folder)
    predictions = [predict(policy, comparison) for policy in comparison.runs]
    console = Console(stderr=True)
    console.print(_table(predictions), crop=False)
    if as_json:
        print(json.dumps(_result(folder, predictions)))


def predict(policy: str, comparison: Comparison) -> Prediction:
    """Simulate what this policy did, from what was measured elsewhere.

    Raises:
      UserError: its rounds are not whole epochs, or the rest does not tell enough.
    """
    run = comparison.runs[policy]
    header, rounds = of_kind(run, RunHeader)[0], of_kind(run, RoundRecord)
    config = from_json(header.config)
    if config.round_steps is not None:
        raise UserError(
            f"rounds of {config.round_steps} steps: only runs whose rounds are epochs "
            "can be predicted (--round-steps None)"
        )
    counted = counted_epochs(rounds)
    evidence = gather(policy, comparison, counted)
    scenario = _scenario(config, rounds, header.workers, evidence)
    simulated = simulate(
        World(scenario),
        policy,
        lambda shares: make_policy(policy, config.shares or shares),
    )
    settled = [simulated.rounds[epoch] for epoch in counted]
    return Prediction(
        policy=policy,
        predicted_seconds=statistics.median(
            r.step_seconds * scenario.steps for r in settled
        ),
        measured_seconds=statistics.median(
            r.seconds - max(r.compile_seconds) for r in rounds if r.epoch in counted
        ),
        predicted_sizes=tuple(settled[-1].sizes.tolist()),
        measured_sizes=rounds[-1].sizes,
    )


def gather(policy: str, comparison: Comparison, counted: Sequence[int]) -> Evidence:
    """All that was measured but the counted epochs of this policy."""
    points = [
        (w, size, seconds)
        for solo in comparison.solos
        for w, (size, seconds) in enumerate(
            zip(solo.sizes, solo.step_seconds, strict=True)
        )
    ]
    network, compiling = [], []
    for record in _other_rounds(policy, comparison.runs, counted):
        measured = [(w, n) for w, n in enumerate(record.measured_steps) if n]
        points += [
            (w, record.capacities[w], record.busy_seconds[w] / n) for w, n in measured
        ]
        if measured:
            network.append(min(record.wait_seconds[w] / n for w, n in measured))
        if sum(record.compilations):
            compiling.append(max(record.compile_seconds))
    return Evidence(tuple(points), tuple(network), tuple(compiling))


def _other_rounds(
    policy: str, runs: Mapping[str, Sequence[Any]], counted: Sequence[int]
) -> Iterator[RoundRecord]:
    for name, run in runs.items():
        for record in of_kind(run, RoundRecord):
            if name != policy or record.epoch not in counted:
                yield record


def _scenario(
    config: Config,
    rounds: Sequence[RoundRecord],
    workers: int,
    evidence: Evidence,
) -> Scenario:
    """The run as a scenario. Its last, partial batches are padded: they cost as much."""
    caps = config.caps or (None,) * workers
    tables = []
    for w in range(workers):
        mine = [(size, seconds) for v, size, seconds in evidence.points if v == w]
        sizes, seconds = zip(*mine, strict=True) if mine else ((), ())
        tables.append(fitted_table(f"worker {w}", sizes, seconds))
    # In seconds of one latency: what it is made of makes no difference here.
    turns = max(2 * (workers - 1), 1)
    network = statistics.median(evidence.network_seconds or (0.0,)) / turns
    return Scenario(
        workers=tuple(Worker(t, cap) for t, cap in zip(tables, caps, strict=True)),
        global_batch=config.global_batch,
        rounds=len(rounds),
        steps=max(r.steps for r in rounds),
        network=Network(latency_seconds=network),
        compile_seconds=statistics.median(evidence.compile_seconds or (0.0,)),
        granule=config.granule,
        growth=config.growth,
        aligned=config.aligned,
        dead_band=config.dead_band,
    )


def _table(predictions: Sequence[Prediction]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        title=Text("seconds an epoch, compilation left out", style="bold"),
        title_justify="left",
        caption=Text(
            "predicted: simulated, from what was measured outside of these epochs.\n"
            f"within {TOLERANCE:.0%}: {'all' if _all_near(predictions) else 'not all'}",
            style="dim",
        ),
        caption_justify="left",
    )
    table.add_column(Text("policy"), no_wrap=True)
    for title in ("predicted", "measured", "error", "sizes\npredicted", "measured"):
        table.add_column(Text(title), justify="right", no_wrap=True)
    for p in predictions:
        table.add_row(
            Text(p.policy),
            f"{p.predicted_seconds:.2f}",
            f"{p.measured_seconds:.2f}",
            f"{100 * p.error:+.1f} %",
            per_worker(p.predicted_sizes, "d"),
            per_worker(p.measured_sizes, "d"),
        )
    return table


def _all_near(predictions: Sequence[Prediction]) -> bool:
    return all(abs(p.error) <= TOLERANCE for p in predictions)


def _result(folder: Path, predictions: Sequence[Prediction]) -> dict[str, Any]:
    return {
        "against": str(folder),
        "policies": {
            p.policy: {
                "predicted_epoch_seconds": p.predicted_seconds,
                "measured_epoch_seconds": p.measured_seconds,
                "error": p.error,
                "predicted_sizes": list(p.predicted_sizes),
                "measured_sizes": list(p.measured_sizes),
            }
            for p in predictions
        },
    }

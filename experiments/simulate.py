"""`simulate`: every policy in simulated clusters, in seconds of true time tables."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments import scenarios
from experiments.compare import new_folder
from experiments.config import CONFIG_FOLDER
from experiments.scenarios import NamedScenario
from jdlb.balance import policies
from jdlb.balance.policies.protocol import AnyPolicy
from jdlb.balance.simulation.score import ideal_step_seconds, oracle_over_ideal, score
from jdlb.balance.simulation.simulator import SimulatedRun, simulate
from jdlb.balance.simulation.world import World
from jdlb.errors import UserError
from jdlb.report.figures import save_figure
from jdlb.report.league import (
    Standing,
    Trace,
    draw_league,
    draw_runs,
    league_json,
    league_markdown,
    league_table,
)

LEAGUE_FILE = "league.json"
DOCS_FOLDER = CONFIG_FOLDER.parent / "docs"
DOCS_COMMAND = "python -m experiments simulate --docs"


@dataclass(frozen=True)
class SimulateOptions:
    """What `simulate` takes beside the names of scenarios."""

    policies: tuple[str, ...] = ()
    """Policies to simulate, in this order; none for all."""
    workers: int | None = None
    """Number of workers: those of the scenario over and over, the batch in proportion."""
    rounds: int | None = None
    """Rounds to simulate; None for what the scenario says."""
    seed: int | None = None
    """Seed of noise and disturbances; None for what the scenario says."""
    out: Path | None = None
    """Folder for the result and figures; None for a new one under runs/."""
    json: bool = False
    """Print the result as one JSON object, last on standard output."""
    docs: bool = False
    """Write docs/league.md and its figure: all policies in all scenarios."""
    against: Path | None = None
    """A folder that `compare` wrote to: predict its epoch times, beside the measured."""


@dataclass(frozen=True, eq=False)
class Played:
    """One scenario under every policy."""

    standing: Standing
    runs: dict[str, SimulatedRun]


def simulate_all(names: Sequence[str], options: SimulateOptions) -> None:
    """Simulate, show the league, and say where everything is.

    Raises:
      UserError: bad input; nothing ran.
    """
    chosen = tuple(options.policies or sorted(policies.POLICIES))
    check_policies(chosen)
    if options.docs:
        _only_docs(names, options)
    todo = [
        changed(scenarios.load(name), options) for name in names or scenarios.names()
    ]
    if len({named.name for named in todo}) < len(todo):
        raise UserError(f"scenarios {' '.join(names)}: one is there twice")
    out = None if options.docs else new_folder(options.out, "simulate")
    console = Console(stderr=True)
    played = []
    for named in todo:
        played.append(play(named, chosen))
        console.print(league_table(played[-1].standing), crop=False)
        console.print()
    standings = [p.standing for p in played]
    if out is None:
        _write_docs(console, standings)
    else:
        _write(console, out, played)
    if options.json:
        print(json.dumps(_result(standings)))


def check_policies(names: Sequence[str]) -> None:
    """Everything that can be wrong with them before anything runs.

    Raises:
      UserError: it is.
    """
    if len(set(names)) < len(names):
        raise UserError(f"--policies {' '.join(names)}: one is there twice")
    for name in names:
        make_policy(name, (1.0,))


def make_policy(name: str, shares: Sequence[float]) -> AnyPolicy:
    """The policy of a name; `fixed` gets the shares that suit calm workers best."""
    return policies.get(name, **({"shares": shares} if name == "fixed" else {}))


def changed(named: NamedScenario, options: SimulateOptions) -> NamedScenario:
    """The scenario with what the flags say.

    Raises:
      UserError: a flag is out of range, or does not fit the scenario.
    """
    scenario = named.scenario
    if options.workers is not None:
        scenario = scenario.resized(options.workers)
    given = {"rounds": options.rounds, "seed": options.seed}
    scenario = dataclasses.replace(
        scenario, **{name: value for name, value in given.items() if value is not None}
    )
    return dataclasses.replace(named, scenario=scenario)


def play(named: NamedScenario, chosen: Sequence[str]) -> Played:
    """All policies in one scenario."""
    world = World(named.scenario)
    runs = {
        name: simulate(world, name, lambda shares, name=name: make_policy(name, shares))
        for name in chosen
    }
    standing = Standing(
        scenario=named.name,
        what=named.what,
        workers=len(named.scenario.workers),
        global_batch=named.scenario.global_batch,
        rounds=named.scenario.rounds,
        steps=named.scenario.steps,
        oracle_over_ideal=oracle_over_ideal(world),
        scores={name: score(run) for name, run in runs.items()},
        informed=("fixed",),
    )
    return Played(standing, runs)


def trace(run: SimulatedRun) -> Trace:
    """What the figures show of a run."""
    sizes = np.array([r.sizes for r in run.rounds], np.float64)
    return Trace(
        shares=np.where(run.world.present, sizes, np.nan) / sizes.sum(1, keepdims=True),
        step_seconds=np.array([r.step_seconds for r in run.rounds]),
        ideal_seconds=ideal_step_seconds(run.world),
    )


def _result(standings: Sequence[Standing]) -> dict:
    """One object for one scenario; several of them under "scenarios"."""
    objects = [league_json(standing) for standing in standings]
    return objects[0] if len(objects) == 1 else {"scenarios": objects}


def _write(console: Console, out: Path, played: Sequence[Played]) -> None:
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    result = _result([p.standing for p in played])
    (out / LEAGUE_FILE).write_text(json.dumps(result, indent=1) + "\n")
    names = [LEAGUE_FILE]
    for p in played:
        traces = {name: trace(run) for name, run in p.runs.items()}
        names.append(f"{p.standing.scenario}.png")
        save_figure(draw_runs(p.standing, traces), out / names[-1])
    if len(played) > 1:
        names.append("league.png")
        save_figure(draw_league([p.standing for p in played]), out / names[-1])
    console.print(f"In {out}:\n  {', '.join(names)}", highlight=False, soft_wrap=True)


def _only_docs(names: Sequence[str], options: SimulateOptions) -> None:
    plain = dataclasses.replace(options, docs=False, json=False)
    if names or plain != SimulateOptions():
        raise UserError(
            "--docs writes about all policies in all scenarios as they are: "
            "give it no scenario and no other flag but --json"
        )


def _write_docs(console: Console, standings: Sequence[Standing]) -> None:
    DOCS_FOLDER.mkdir(exist_ok=True)
    page, figure = DOCS_FOLDER / "league.md", DOCS_FOLDER / "league.png"
    page.write_text(league_markdown(standings, DOCS_COMMAND, figure.name))
    save_figure(draw_league(standings), figure)
    console.print(f"written: {page}, {figure}", highlight=False, soft_wrap=True)

"""Scenarios to simulate: short files under `configs/scenarios/`, read here alone.

A file is a Python module with a function `scenario() -> Scenario` and a docstring that
is its lab note; the first line of it stands in tables.
"""

import runpy
from dataclasses import dataclass
from pathlib import Path

from experiments.config import CONFIG_FOLDER
from jdlb.balance.simulation.scenario import Scenario
from jdlb.errors import UserError, unknown_name

SCENARIO_FOLDER = CONFIG_FOLDER / "scenarios"


@dataclass(frozen=True)
class NamedScenario:
    """A scenario with its name and its first line."""

    name: str
    what: str
    scenario: Scenario


def names() -> list[str]:
    """The scenarios under `configs/scenarios/`."""
    return sorted(path.stem for path in SCENARIO_FOLDER.glob("*.py"))


def load(name: str) -> NamedScenario:
    """The scenario of a name, or of a path to a Python file.

    Raises:
      UserError: there is none, or the file does not define a sound one.
    """
    path = Path(name)
    if path.suffix != ".py":
        if name not in names():
            raise unknown_name("scenario", name, names())
        path = SCENARIO_FOLDER / f"{name}.py"
    if not path.is_file():
        raise UserError(f"no scenario file {path}: name one of {', '.join(names())}")
    module = runpy.run_path(str(path))
    made = module["scenario"]() if "scenario" in module else None
    if not isinstance(made, Scenario):
        raise UserError(
            f"{path} does not define scenario() -> Scenario: see "
            f"configs/{SCENARIO_FOLDER.name}/"
        )
    lines = (module["__doc__"] or path.stem).strip().splitlines()
    return NamedScenario(path.stem, lines[0], made)

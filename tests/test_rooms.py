"""The import rule: which room may know which, read from the source of every module.

Nothing is imported to check it: an import inside a function, or for type checking
only, is knowledge too and counts.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LEAVES = frozenset({"jdlb.errors", "jdlb.records"})
SIDE_BY_SIDE = ("jdlb.data", "jdlb.engine", "jdlb.cluster")
# What `trainer` is cut into: as much as it knows, and known by it alone.
OF_TRAINER = frozenset(
    {"jdlb.agreement", "jdlb.pipeline", "jdlb.steering", "jdlb.tally"}
)
LIBRARY = frozenset(
    {"jdlb.balance", *SIDE_BY_SIDE, "jdlb.models", "jdlb.report", "jdlb.trainer"}
)
# What a room may import beside itself and the leaves.
MAY_KNOW: dict[str, frozenset[str]] = {
    "jdlb.errors": frozenset(),
    "jdlb.records": frozenset(),
    "jdlb.balance": frozenset(),
    **{room: frozenset({"jdlb.balance"}) for room in SIDE_BY_SIDE},
    "jdlb.models": frozenset(),
    "jdlb.report": frozenset(),
    **{part: frozenset({"jdlb.balance", *SIDE_BY_SIDE}) for part in OF_TRAINER},
    "jdlb.steering": frozenset({"jdlb.agreement", "jdlb.balance", "jdlb.engine"}),
    "jdlb.trainer": frozenset({"jdlb.balance", *SIDE_BY_SIDE, *OF_TRAINER}),
    # The package itself: names it may pass on from any room.
    "jdlb": LIBRARY,
    "experiments": LIBRARY | {"configs", "jdlb"},
    "configs": LIBRARY | {"experiments", "jdlb"},
}
NO_DEVICES = ("jdlb.balance", "jdlb.data", "jdlb.report", "jdlb.records", "jdlb.errors")
DEVICE_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax")


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def room_of(module: str) -> str | None:
    """The room with the longest name that holds the module."""
    # `jdlb` is a room of one file: a module that no other room claims has no rule.
    rooms = [r for r in MAY_KNOW if (module == r if r == "jdlb" else within(module, r))]
    return max(rooms, key=len, default=None)


def imported(module: str, is_package: bool, source: str) -> Iterator[str]:
    """Full names of all that a module imports; of `from a import b`, `a.b`."""
    for node in ast.walk(ast.parse(source, filename=module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                up = node.level - is_package
                parent = ".".join(parts[: len(parts) - up])
                base = f"{parent}.{base}" if base else parent
            yield from (f"{base}.{alias.name}" for alias in node.names)


def known_room(name: str) -> str | None:
    """The room that an imported name belongs to; None outside the repository."""
    room = room_of(name)
    if room is None and within(name, "jdlb"):
        # A name out of `jdlb/__init__.py`, or a module without a rule.
        return "jdlb"
    return room


def violations(module: str, is_package: bool, source: str) -> list[str]:
    """One line for each import that the rule forbids."""
    room = room_of(module)
    if room is None:
        return [f"{module} belongs to no room: give it a rule in {Path(__file__).name}"]
    allowed = MAY_KNOW[room] | {room} | (LEAVES if room not in LEAVES else set())
    if room == "jdlb.records":
        allowed |= {"jdlb.errors"}
    found = []
    for name in imported(module, is_package, source):
        target = known_room(name)
        if target is not None and target not in allowed:
            found.append(f"{module} imports {name}: {room} must not know {target}")
        if room in NO_DEVICES and any(within(name, lib) for lib in DEVICE_LIBRARIES):
            found.append(f"{module} imports {name}: {room} runs without JAX")
    return found


def modules() -> Iterator[tuple[str, bool, Path]]:
    for top in ("jdlb", "experiments", "configs"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            yield name, is_package, path


def test_every_module_keeps_to_the_rule() -> None:
    found = [
        line
        for name, is_package, path in modules()
        for line in violations(name, is_package, path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_the_walk_sees_the_rooms() -> None:
    names = {name for name, _, _ in modules()}
    assert {"jdlb", "jdlb.records", "jdlb.report", "jdlb.report.summary"} <= names


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jdlb.balance.policies.new", "import jdlb.data"),
        ("jdlb.balance.policies.new", "from jdlb.engine import step"),
        ("jdlb.balance.policies.new", "from jdlb import trainer"),
        ("jdlb.balance.policies.new", "from ...engine import step"),
        ("jdlb.balance.policies.new", "from ... import data"),
        ("jdlb.balance.new", "import jax.numpy as jnp"),
        ("jdlb.balance.new", "def f():\n    from jax import jit"),
        ("jdlb.data.new", "import optax"),
        ("jdlb.data.new", "from jdlb.cluster import hosts"),
        ("jdlb.data.new", "from jdlb.engine.meter import Meter"),
        ("jdlb.engine.new", "from jdlb.data import partition"),
        ("jdlb.engine.new", "from jdlb.models import losses"),
        ("jdlb.engine.new", "import numpy, jdlb.trainer"),
        ("jdlb.cluster.launch.new", "from jdlb import data"),
        ("jdlb.cluster.launch.new", "import experiments"),
        ("jdlb.models.new", "from jdlb.engine import step"),
        ("jdlb.report.new", "from jdlb.balance.allocation import Ladder"),
        ("jdlb.report.new", "import flax"),
        (
            "jdlb.report.new",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax",
        ),
        ("jdlb.records", "import jax"),
        ("jdlb.records", "from jdlb.report import summary"),
        ("jdlb.errors", "from jdlb.records import Record"),
        ("jdlb.errors", "import jdlb"),
        ("jdlb.trainer", "from jdlb.report import summary"),
        ("jdlb.trainer", "from jdlb.models import cnn"),
        ("jdlb.trainer", "from experiments import train"),
        ("jdlb.tally", "from jdlb.trainer import Trainer"),
        ("jdlb.engine.new", "from jdlb import tally"),
        ("experiments.new", "from jdlb.agreement import digest"),
        ("jdlb", "import experiments.train"),
        ("jdlb.somewhere", "import math"),
    ],
)
def test_a_forbidden_import_is_caught(module: str, source: str) -> None:
    assert len(violations(module, False, source)) == 1


@pytest.mark.parametrize(
    ("module", "is_package", "source"),
    [
        ("jdlb.balance.policies.new", False, "from .protocol import Policy"),
        ("jdlb.balance.policies", True, "from .. import allocation"),
        ("jdlb.balance.new", False, "import numpy\nfrom jdlb.errors import UserError"),
        ("jdlb.data.new", False, "from jdlb.balance.allocation import Allocation"),
        ("jdlb.engine.new", False, "import jax\nfrom jdlb.balance import allocation"),
        ("jdlb.report.new", False, "from jdlb import records"),
        ("jdlb.report.new", False, "import jaxtyping"),
        ("jdlb.records", False, "from jdlb.errors import UserError"),
        ("jdlb.trainer", False, "from jdlb.engine import step\nimport jdlb.data"),
        ("jdlb", True, "from jdlb.trainer import train"),
        ("experiments.new", False, "import configs.x\nfrom jdlb.report import tables"),
        ("configs.new", False, "from jdlb.models import cnn"),
    ],
)
def test_an_allowed_import_passes(module: str, is_package: bool, source: str) -> None:
    assert violations(module, is_package, source) == []


def test_report_and_balance_load_without_jax() -> None:
    """What the source cannot show: nothing they import brings JAX in by the back."""
    rooms = ("jdlb.balance", "jdlb.report", "jdlb.records")
    names = [n for n, _, _ in modules() if any(within(n, room) for room in rooms)]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"loaded = [n for n in {DEVICE_LIBRARIES!r} if n in sys.modules]\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr

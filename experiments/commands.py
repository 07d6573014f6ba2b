"""The command line: which commands there are, and their flags from typed records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import tyro

from experiments import config as configs
from experiments import scenarios
from experiments.against import check_alone, predict_all
from experiments.compare import CompareOptions, compare
from experiments.config import Config
from experiments.simulate import SimulateOptions, simulate_all
from experiments.single import TrainOptions, train_alone
from jdlb.balance import policies
from jdlb.data import builders
from jdlb.errors import UserError, unknown_name

PROGRAM = "python -m experiments"

Given = TypeVar("Given")

OVERVIEW = """\
usage: {program} COMMAND ...

Dynamic load balance for synchronous data-parallel training, in JAX.

commands:
  compare CONFIG   the same model under several policies, on local worker processes
                   with unlike CPU budgets; table, figures and records
  train CONFIG     one run: alone, or as one process of a job
  prepare DATASET  write a data set where training finds it
  simulate [SCENARIO ...]
                   policies in simulated clusters of any size; without a name all
                   scenarios; --against DIR sets it beside what `compare` measured
  bench step       a step of ours against a plain jitted one, on two emulated devices

examples:
  {program} compare mnist5k
  {program} compare mnist5k --policies equal dlb --speeds 1 0.5 --epochs 4 --json
  {program} train mnist5k --policy fixed --shares 1.0 --out runs/one
  {program} simulate steady thousand --policies equal dlb
  {program} compare mnist5k --help

configs:   {configs}   (or the path of a file like those under configs/)
scenarios: {scenarios}
policies:  {policies}
data sets: {datasets}
"""


@dataclass(frozen=True)
class PrepareOptions:
    """What `prepare` takes."""

    data_dir: Path = Path("~/.cache/jdlb")
    """Folder for the prepared data set."""
    source_dir: Path | None = None
    """Folder of the original files, where the data set has any; None for its default."""


@dataclass(frozen=True)
class CompareArguments:
    """All that `compare` takes."""

    config: Config
    options: CompareOptions


@dataclass(frozen=True)
class TrainArguments:
    """All that `train` takes."""

    config: Config
    options: TrainOptions


def run(arguments: Sequence[str]) -> None:
    """Run one command line.

    Raises:
      UserError: there is no such command, or what it names does not exist.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview(), end="")
        return
    name, *rest = arguments
    if name not in _COMMANDS:
        raise unknown_name("command", name, _SHOWN)
    _COMMANDS[name](rest)


def overview() -> str:
    """What there is, with examples."""
    return OVERVIEW.format(
        program=PROGRAM,
        configs=", ".join(configs.names()),
        scenarios=", ".join(scenarios.names()),
        policies=", ".join(sorted(policies.POLICIES)),
        datasets=", ".join(builders.names()),
    )


def _compare(arguments: Sequence[str]) -> None:
    name, rest = _named("compare", "CONFIG", arguments, configs.names())
    default = CompareArguments(configs.load(name), CompareOptions())
    given = _flags("compare", name, rest, default)
    compare(name, given.config, given.options)


def _train(arguments: Sequence[str]) -> None:
    name, rest = _named("train", "CONFIG", arguments, configs.names())
    default = TrainArguments(configs.load(name), TrainOptions())
    given = _flags("train", name, rest, default)
    train_alone(name, given.config, given.options)


def _simulate(arguments: Sequence[str]) -> None:
    flags = [i for i, word in enumerate(arguments) if word.startswith("-")]
    first = flags[0] if flags else len(arguments)
    chosen = list(arguments[:first])
    options = _flags("simulate", "[SCENARIO ...]", arguments[first:], SimulateOptions())
    if options.against is not None:
        check_alone(chosen, options)
        predict_all(options.against, options.json)
        return
    simulate_all(chosen, options)


def _process(arguments: Sequence[str]) -> None:
    from experiments.job import Job, run

    run(Job.read(Path(arguments[0])))


def _prepare(arguments: Sequence[str]) -> None:
    name, rest = _named("prepare", "DATASET", arguments, builders.names())
    options = _flags("prepare", name, rest, PrepareOptions())
    folder = options.data_dir.expanduser()
    made = builders.prepare(name, folder, options.source_dir)
    print(f"{name} in {folder}: {'written' if made else 'was there already'}")


def _bench(arguments: Sequence[str]) -> None:
    from experiments.bench import bench_step

    if list(arguments) != ["step"]:
        raise UserError(f"bench {' '.join(arguments)}: only `{PROGRAM} bench step`")
    bench_step()


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "compare": _compare,
    "train": _train,
    "simulate": _simulate,
    "prepare": _prepare,
    "bench": _bench,
    "process": _process,
}
# `process` is what `compare` starts, not for people.
_SHOWN = tuple(name for name in _COMMANDS if name != "process")


def _flags(command: str, name: str, arguments: Sequence[str], default: Given) -> Given:
    """`default` with any field changed by a flag."""
    return tyro.cli(
        type(default),
        default=default,
        prog=f"{PROGRAM} {command} {name}",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _named(
    command: str, what: str, arguments: Sequence[str], known: Sequence[str]
) -> tuple[str, list[str]]:
    """The first argument, which must be a name, and the rest."""
    if not arguments or arguments[0].startswith("-"):
        raise UserError(
            f"{command} needs {what} first, one of {', '.join(known)}: "
            f"{PROGRAM} {command} {known[0]} [--help]"
        )
    return arguments[0], list(arguments[1:])

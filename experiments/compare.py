"""`compare`: the same model under several policies, on real, unlike workers."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments.config import CONFIG_FOLDER, Config
from experiments.config import check as check_config
from experiments.job import JOB_FILE, Job
from experiments.machine import machine_text
from experiments.progress import shown
from experiments.train import make_cluster, make_policy
from jdlb.cluster.launch.local import check_speeds, run_local, usable_cores
from jdlb.data import builders
from jdlb.errors import UserError
from jdlb.report.figures import save_figures
from jdlb.report.scalars import write_scalars
from jdlb.report.summary import Comparison, compare_json, read_comparison
from jdlb.report.tables import comparison_table

COMPARISON_FILE = "comparison.json"
TABLE_WIDTH = 100


@dataclass(frozen=True)
class CompareOptions:
    """What `compare` takes beside the fields of the configuration."""

    policies: tuple[str, ...] = ("equal", "static", "dlb")
    """Policies to compare, in this order."""
    speeds: tuple[float, ...] = (1.0, 0.5, 0.25)
    """CPU budget of each worker, in cores; one worker process for each."""
    out: Path | None = None
    """Folder for records, table and figures; None for a new one under runs/."""
    json: bool = False
    """Print the result as one JSON object, last on standard output."""


def compare(name: str, config: Config, options: CompareOptions) -> None:
    """Run the comparison, show it, and say where everything is.

    Raises:
      UserError: bad input; nothing was started.
    """
    check(config, options)
    console = Console(stderr=True)
    out = new_folder(options.out, name)
    if builders.prepare(config.dataset, config.data_folder):
        console.print(f"prepared {config.dataset} in {config.data_folder}", style="dim")
    job = Job(name, config, options.policies, options.speeds, out)
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    job.write()
    with shown(console, len(job.policies) * config.epochs) as handler:
        run_local(
            [sys.executable, "-m", "experiments", "process", str(out / JOB_FILE)],
            len(job.speeds),
            environ=_worker_environ(),
            log_dir=out / "logs",
            speeds=job.speeds,
            on_event=handler,
        )
    _show(console, job, read_comparison(out, job.policies), options.json)


def check(config: Config, options: CompareOptions) -> None:
    """Everything that can be wrong and be known before a process starts.

    Raises:
      UserError: it is.
    """
    check_config(config)
    if not options.speeds:
        raise UserError("--speeds is empty: give the cores of each worker, as 1 0.5")
    if not options.policies:
        raise UserError("--policies is empty: name at least one")
    if len(set(options.policies)) < len(options.policies):
        raise UserError(f"--policies {' '.join(options.policies)}: one is there twice")
    check_speeds(options.speeds, len(options.speeds), usable_cores())
    cluster = make_cluster(config, len(options.speeds))
    for policy in options.policies:
        make_policy(policy, config).init(cluster)
    builders.get(config.dataset)


def new_folder(out: Path | None, name: str) -> Path:
    """The folder for the results, which must not hold another run's.

    Raises:
      UserError: it holds files, or it is one.
    """
    if out is None:
        stem = Path(name).stem
        return (Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"--out {out} holds another run's records or other files: name a new folder"
        )
    return out.resolve()


def _worker_environ() -> dict[str, str]:
    """This environment, in which `experiments` can be imported from anywhere."""
    root = str(CONFIG_FOLDER.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _show(console: Console, job: Job, comparison: Comparison, as_json: bool) -> None:
    summaries = comparison.summaries
    ideal = comparison.ideal_examples_per_second
    result = compare_json(job.name, job.speeds, ideal, summaries)
    (job.out / COMPARISON_FILE).write_text(json.dumps(result, indent=1) + "\n")
    figures = save_figures(comparison, job.out)
    for policy, run in comparison.runs.items():
        write_scalars(run, job.out / "tensorboard" / policy)
    table = comparison_table(
        summaries, speeds=job.speeds, ideal=ideal, machine=machine_text()
    )
    # Read in a log or a narrow terminal: folded lines rather than cut cells.
    wide = Console(stderr=True, width=max(console.width, TABLE_WIDTH))
    wide.print(table)
    _say_where(console, job.out, figures)
    if as_json:
        print(json.dumps(result))


def _say_where(console: Console, out: Path, figures: Sequence[Path]) -> None:
    names = ", ".join(path.name for path in figures)
    console.print(
        f"\nIn {out}:\n  {COMPARISON_FILE}, {names}\n  POLICY/records.jsonl, "
        "POLICY/params.msgpack, tensorboard/, logs/",
        highlight=False,
        soft_wrap=True,
    )

"""What people read in a terminal: the comparison table and one line a round.

Must not compute: every number comes from a summary or a record as it is.
"""

from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from jdlb.records import RoundRecord
from jdlb.report.summary import PolicySummary, step_seconds

# More workers than this are shown as a range.
MOST_LISTED = 8
UNKNOWN = "-"

_COLUMNS: tuple[tuple[str, Callable[[PolicySummary], str]], ...] = (
    ("epoch\ntime\n[s]", lambda s: _number(s.epoch_seconds, ".2f")),
    ("rate\n[examples\n/s]", lambda s: _number(s.examples_per_second, ",.0f")),
    ("of\nideal\n[%]", lambda s: _percent(s.fraction_of_ideal)),
    ("utili-\nsation\n[%]", lambda s: _percent(s.utilisation)),
    ("wait\nshare\n[%]", lambda s: _percent(s.wait_share)),
    ("busy\nspread\n[1]", lambda s: _number(s.spread, ".3f")),
    ("rebal-\nances", lambda s: f"{s.rebalances}"),
    ("compi-\nlations", lambda s: f"{s.compilations}"),
    ("test\naccuracy\n[%]", lambda s: _percent(s.test_accuracy, ".2f")),
    ("sizes\n[examples]", lambda s: per_worker(s.sizes, "d", most=4)),
)


def comparison_table(
    summaries: Iterable[PolicySummary],
    *,
    speeds: Sequence[float],
    ideal: float | None,
    machine: str,
    virtual: bool = False,
) -> Table:
    """One row a policy, readable at 100 columns.

    Args:
      summaries: the rows, in order.
      speeds: CPU budget of each worker in cores; empty when nobody limited them.
      ideal: examples/s of the workers, each alone; None when not probed.
      machine: what ran this, in words.
      virtual: whether the seconds come from a time model instead of a clock.
    """
    summaries = tuple(summaries)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        caption=Text(_caption(summaries, speeds, ideal, machine, virtual), style="dim"),
        caption_justify="left",
    )
    table.add_column(Text("policy"), no_wrap=True)
    for header, _ in _COLUMNS:
        # `Text`, because rich takes "[s]" in a plain string for a style.
        table.add_column(Text(header), justify="right", no_wrap=True)
    for summary in summaries:
        cells = (cell(summary) for _, cell in _COLUMNS)
        table.add_row(Text(summary.policy), *map(Text, cells))
    return table


def round_line(record: RoundRecord) -> str:
    """One line of log: what a round took, who was busy, and what was decided."""
    busy = [
        step_seconds(*totals)
        for totals in zip(record.busy_seconds, record.measured_steps, strict=True)
    ]
    milliseconds = [None if b is None else 1e3 * b for b in busy]
    loss = record.metrics.get("loss")
    parts = [
        f"{record.policy} epoch {record.epoch}",
        f"{record.seconds:.2f} s",
        f"loss {_number(loss, '.4f')}",
        f"sizes {per_worker(record.sizes, 'd')}",
        f"busy {per_worker(milliseconds, '.0f')} ms/step",
    ]
    if record.skipped_steps:
        parts.append(f"{record.skipped_steps} steps skipped")
    return "  ".join([*parts, record.reason])


def per_worker(
    values: Sequence[float | None], spec: str, most: int = MOST_LISTED
) -> str:
    """One value a worker; with more than `most` workers, the smallest and largest.

    >>> per_worker([136, 68, 36], "d")
    '136/68/36'
    >>> per_worker([0.25, None, 0.5, 0.125], ".3f", most=3)
    '0.125..0.500 (4)'
    """
    if len(values) <= most:
        return "/".join(_number(value, spec) for value in values)
    known = [value for value in values if value is not None]
    low, high = (min(known), max(known)) if known else (None, None)
    return f"{_number(low, spec)}..{_number(high, spec)} ({len(values)})"


def _caption(
    summaries: Sequence[PolicySummary],
    speeds: Sequence[float],
    ideal: float | None,
    machine: str,
    virtual: bool,
) -> str:
    cores = f"{per_worker(speeds, 'g')} cores" if speeds else "not limited"
    alone = "not probed" if ideal is None else f"{ideal:,.0f} examples/s"
    clock = "virtual clock: seconds of a time model" if virtual else "wall clock"
    counted = sorted({e for s in summaries for e in s.counted_epochs})
    ends = dict.fromkeys((counted[0], counted[-1])) if counted else ("none",)
    span = "-".join(map(str, ends))
    return (
        f"\nCPU budgets: {cores}. Ideal (each worker alone): {alone}.\n"
        f"Medians over epochs {span}, counted from 0; {clock}.\n"
        f"Machine: {machine}"
    )


def _number(value: float | None, spec: str) -> str:
    return UNKNOWN if value is None else format(value, spec)


def _percent(value: float | None, spec: str = ".0f") -> str:
    return UNKNOWN if value is None else format(100.0 * value, spec)

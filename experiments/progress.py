"""Progress of a comparison in the terminal, from the events of its lead.

On a terminal a bar with one line a round above it; else the lines alone. All on
standard error: standard output is for results.
"""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jdlb.cluster.launch.channel import Event, EventHandler


@contextlib.contextmanager
def shown(console: Console, epochs: int) -> Iterator[EventHandler]:
    """An event handler that shows progress through `epochs` in all."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task("starting the workers", total=epochs)

        def handle(worker: int, event: Event) -> Event | None:
            match event:
                case {"event": "started", "throttle": method}:
                    limit = f"CPU budgets by {method}" if method else "no CPU budgets"
                    progress.console.print(f"workers started; {limit}", style="dim")
                case {"event": "warning", "text": text}:
                    progress.console.print(f"warning: {text}", style="yellow")
                case {"event": "probe", "text": text}:
                    progress.update(bar, description=text)
                    if not console.is_terminal:
                        progress.console.print(text, style="dim")
                case {"event": "compiling", "policy": policy}:
                    progress.update(bar, description=f"{policy}: compiling")
                case {"event": "line", "text": text}:
                    progress.console.print(text, highlight=False, soft_wrap=True)
                case {"event": "epoch", "policy": policy, "epoch": epoch}:
                    description = f"{policy}: epoch {epoch} done"
                    progress.update(bar, advance=1, description=description)
            return None

        yield handle

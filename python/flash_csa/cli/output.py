"""What the commands share: consoles, tables, progress bars."""

import json
import sys
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ..configs import BY_NAME

Model = Annotated[str, typer.Option(help=f"{', '.join(BY_NAME)} or a config.json.")]
PLAIN_WIDTH = 100  # columns where the output is no terminal


def console() -> Console:
    """For results: stdout."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(width=width, highlight=False)


def print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result, indent=1))


def progress(*, quiet: bool) -> Progress:
    """Bars on stderr with the time that is left; none when quiet or without a terminal."""
    return Progress(
        TextColumn("{task.description:<38}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )


def table(*columns: str, title: str | None = None) -> Table:
    """A plain table; a column whose name begins with ">" is right-aligned."""
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for name in columns:
        made.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return made


def facts(rows: dict[str, str]) -> Table:
    """Names and texts; a long text wraps in its own column."""
    made = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    made.add_column(style="bold", no_wrap=True)
    made.add_column()
    for name, text in rows.items():
        made.add_row(name, text)
    return made


def size(nbytes: int, digits: int = 4) -> str:
    """Bytes to a few digits, in the largest binary unit that leaves at least 1."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.{digits}g} {units[0]}"

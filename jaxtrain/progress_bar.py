"""The progress bar: two lines at the bottom of a terminal, drawn by rich.

Imported only when there is a terminal to draw on.
"""

import logging
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxtrain import units

if TYPE_CHECKING:
    from jaxtrain.progress import View

_GAP = "  "


class Bar:
    """Shows a view until closed; prints, log lines and warnings meanwhile appear above it."""

    def __init__(self, view: "View") -> None:
        self._console = Console(stderr=True)
        self._handlers = _handlers_on_terminal()
        self._live = Live(
            _Renderer(view),
            console=self._console,
            # The clock moves on between two records. One drawing takes 4 ms of one core, so more
            # of them would take time from a step that computes on the CPU.
            refresh_per_second=1,
            redirect_stdout=sys.stdout.isatty(),  # output into a pipe goes on into the pipe
            redirect_stderr=True,
        )
        self._live.start(refresh=True)
        # rich hides the cursor; a process that is killed could not bring it back.
        self._console.show_cursor(True)
        for handler in self._handlers:
            handler.setStream(sys.stderr)
        self._drawn = time.monotonic()

    def refresh(self) -> None:
        """Draws at once, unless it was drawn a moment ago: the records of fast steps."""
        if time.monotonic() - self._drawn > 0.5:
            self._live.refresh()
            self._drawn = time.monotonic()

    def close(self) -> None:
        self._live.stop()
        for handler in self._handlers:
            handler.setStream(sys.stderr)


class _Renderer:
    """Draws the view anew for the width that the terminal has at that moment."""

    def __init__(self, view: "View") -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield Group(self._bar(width), self._details(width))

    def _bar(self, width: int) -> Table:
        view = self._view
        left = view.left()
        columns = [
            Text(view.count(), "bold"),
            ProgressBar(
                max(view.num_steps, 1),
                view.step,
                style="bright_black",
                complete_style="cyan",
                finished_style="green",
            ),
            Text(f"{view.step / max(view.num_steps, 1):4.0%}"),
            Text(f"{units.clock(time.monotonic() - view.started)} elapsed", "bright_black"),
            Text("" if left is None else f"{units.clock(left)} left", "cyan"),
        ]
        if width < 60:
            del columns[3]
        grid = Table.grid(padding=(0, len(_GAP), 0, 0), pad_edge=False, expand=True)
        for column in columns:
            is_bar = isinstance(column, ProgressBar)
            grid.add_column(ratio=1 if is_bar else None, no_wrap=True)
        grid.add_row(*columns)
        return grid

    def _details(self, width: int) -> Text:
        view, line = self._view, Text(no_wrap=True, overflow="ellipsis")
        if view.status or not view.record:
            return Text(
                view.status or "starting", "bright_black", no_wrap=True, overflow="ellipsis"
            )
        line = Text(no_wrap=True, overflow="ellipsis")
        for text in _fitting(view.fields(), width):
            line.append(_GAP if line else "")
            line.append(text, _style(text))
        return line


def _fitting(fields: list[tuple[int, str]], width: int) -> Iterator[str]:
    """The fields that fit into the width, in order; the least important ones go first."""
    kept = sorted(fields)
    while len(kept) > 1 and sum(len(text) + len(_GAP) for _, text in kept) - len(_GAP) > width:
        kept.pop()
    return (text for importance, text in fields if (importance, text) in kept)


def _style(text: str) -> str:
    if text.startswith("loss"):
        return "bold"
    if text.startswith("limit:"):
        return "green" if text == "limit: compute" else "yellow"
    return ""


def _handlers_on_terminal() -> list[logging.StreamHandler]:
    """Handlers of the root logger that would write into the middle of the bar."""
    return [
        handler
        for handler in logging.root.handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr
    ]

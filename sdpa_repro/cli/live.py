"""How far a run of several stages is: a view that is redrawn on a terminal, plain lines on stderr everywhere else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sdpa_repro.cli import output

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console
    from rich.table import Table

FRAMES_PER_SECOND = 8


class View(Protocol):
    """What a run tells; see `diagnosing.stages.Watch`. `pause`: leaves the terminal to others for a block."""

    def begin(self, name: str) -> None:
        """A stage begins."""

    def say(self, text: str) -> None:
        """A sign of life, or something to know."""

    def end(self, name: str, words: str) -> None:
        """A stage ended."""

    def pause(self) -> AbstractContextManager[None]:
        """Print inside this block."""


@contextmanager
def watching() -> Iterator[View]:
    """A view for the block: redrawn when stderr is a terminal and rich is installed, else plain lines."""
    if output.quiet() or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield Plain()
        return
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        yield Plain()
        return
    view = Redrawn(Console(stderr=True, highlight=False))
    try:
        yield view
    finally:
        view.stop()


class Plain:
    """Lines on stderr: what is going on, and which stages are there from before."""

    def begin(self, name: str) -> None:
        """Nothing: the stage itself says what it does."""

    def say(self, text: str) -> None:
        """The text as a line."""
        output.progress(output.clean(text))

    def end(self, name: str, words: str) -> None:
        """A line for a stage whose result was there already."""
        if words.endswith("(from before)"):
            output.progress(output.clean(f"{name}: {words}; --fresh starts over"))

    def pause(self) -> AbstractContextManager[None]:
        """Nothing is in the way."""
        return nullcontext()


@dataclass
class _Stage:
    """A stage on the screen. began and ended: seconds of a steady clock."""

    name: str
    began: float
    ended: float | None = None
    words: str = ""


class Redrawn:
    """The stages as a list that is drawn again in place: mark, name, seconds, and what is said last."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live
        from rich.spinner import Spinner

        self._console = console
        self._stages: list[_Stage] = []
        self._spinner = Spinner("line" if console.encoding.lower() != "utf-8" else "dots")
        self._paused = False
        self._live = Live(
            console=console,
            get_renderable=self._drawn,
            refresh_per_second=FRAMES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
        )

    def begin(self, name: str) -> None:
        """A new line with a spinner."""
        self._stages.append(_Stage(name, time.monotonic()))
        if not self._paused:
            self._live.start()

    def say(self, text: str) -> None:
        """Beside the stage that runs; above the list when none does."""
        text = output.clean(text)
        running = self._stages and self._stages[-1].ended is None
        if running:
            self._stages[-1].words = text
        if not running or self._paused:
            self._console.print(text, markup=False)

    def end(self, name: str, words: str) -> None:
        """The line gets its mark, its final seconds and its words."""
        for stage in self._stages:
            if stage.name == name:
                stage.ended, stage.words = time.monotonic(), output.clean(words)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Take the list off the screen for the block."""
        was, started = self._paused, self._live.is_started
        self._paused = True
        self._live.stop()
        try:
            yield
        finally:
            self._paused = was
            if started:
                self._live.start()

    def stop(self) -> None:
        """Take the list off the screen for good."""
        self._live.stop()

    def _drawn(self) -> Table:
        """The list as it is now."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=2)
        table.add_column(width=7, no_wrap=True)
        table.add_column(width=8, no_wrap=True, justify="right")
        table.add_column(ratio=1, overflow="ellipsis", no_wrap=True)
        now = time.monotonic()
        for stage in self._stages:
            mark = Text("ok", style="green") if stage.ended is not None else self._spinner
            seconds = (stage.ended if stage.ended is not None else now) - stage.began
            table.add_row(mark, Text(stage.name, style="bold"), Text(f"{seconds:.1f} s"), Text(stage.words))
        return table

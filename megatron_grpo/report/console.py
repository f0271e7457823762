"""The one object that writes to the user's terminal, and log records that respect it."""

from __future__ import annotations

import logging
from typing import TextIO

from rich.console import Console
from rich.text import Text

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def open_console(file: TextIO | None = None) -> Console:
    """A console on stdout (or `file`). Text is printed as it is: no markup, no colours by guess, no wrapping."""
    return Console(file=file, highlight=False, markup=False, emoji=False)


def say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def log_through(console: Console, level: int = logging.INFO) -> logging.Handler:
    """Send the root logger's records through a terminal's console, so that they appear above a live display.

    Where the console is no terminal they go to stderr as usual. Replaces the root logger's handlers and returns the
    new one.
    """
    handler = ConsoleLogHandler(console) if console.is_interactive else logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LOG_FORMAT, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    return handler


class ConsoleLogHandler(logging.Handler):
    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        say(self._console, self.format(record))

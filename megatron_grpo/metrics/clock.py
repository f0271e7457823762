"""Where the time of one sequential activity goes, by cause."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OTHER = "other"


class Stopwatch:
    """Charges every second to exactly one cause, so that the causes of a lap add up to its wall time.

    Blocks nest: `with clock.measure("train"): ... with clock.measure("refit"): ...` charges the inner block to
    "refit" alone. Time outside every block is "other". One clock follows one sequential task; two tasks that run at
    once need a clock each (an interleaved exit is an AssertionError).
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._charged_until = now()
        self._running = [OTHER]
        self._lap: dict[str, float] = {}

    @contextmanager
    def measure(self, cause: str) -> Iterator[None]:
        self._charge()
        self._running.append(cause)
        depth = len(self._running)
        try:
            yield
        finally:
            self._charge()
            assert len(self._running) == depth, f"blocks of one clock overlap: {self._running}, leaving {cause!r}"
            self._running.pop()

    def lap(self) -> dict[str, float]:
        """Seconds by cause since the last lap (or the start)."""
        self._charge()
        lap, self._lap = self._lap, {}
        return lap

    def _charge(self) -> None:
        now = self._now()
        cause = self._running[-1]
        self._lap[cause] = self._lap.get(cause, 0.0) + now - self._charged_until
        self._charged_until = now

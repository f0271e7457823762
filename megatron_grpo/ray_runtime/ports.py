"""Where rank 0 of a world listens. Stdlib only."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ABOVE_RAYS = 20_000  # Ray's workers listen on 10002-19999
_LAST = 65_535
_TRIES = 100


def meeting_ports(ephemeral: tuple[int, int]) -> range:
    """Ports that the system never hands out by itself: below its ephemeral range, else above it, else any.

    Between the choice of a port and rank 0 listening on it, every rank opens sockets of its own (gloo, Ray, ZeroMQ).
    A port that `bind(0)` had served could be served again to one of them; these ports cannot.
    """
    first, last = ephemeral
    below, above = range(_ABOVE_RAYS, first), range(max(last + 1, _ABOVE_RAYS), _LAST + 1)
    return max((below, above), key=len) or range(_ABOVE_RAYS, _LAST + 1)


def free_port() -> int:
    """A random meeting port that nobody uses on any interface of this machine. OSError when 100 tries found none."""
    ports, draw = meeting_ports(_ephemeral_range()), random.SystemRandom()
    for _ in range(_TRIES):
        port = draw.choice(ports)
        if _is_free(port):
            return port
    raise OSError(f"none of {_TRIES} ports drawn from {ports.start}-{ports.stop - 1} is free on this machine")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))  # all interfaces: that is where a rendezvous store listens
        except OSError:
            return False
    return True


def _ephemeral_range() -> tuple[int, int]:
    """The kernel's; the usual one of other systems where it cannot be read."""
    try:
        first, last = _EPHEMERAL_RANGE.read_text().split()
    except OSError:
        return 49_152, _LAST
    return int(first), int(last)

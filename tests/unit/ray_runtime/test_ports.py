"""Where the ranks of a world meet: never on a port that the system may hand to somebody else first."""

import socket

import pytest

from megatron_grpo.ray_runtime import ports


@pytest.mark.parametrize(
    ("ephemeral", "expected"),
    [
        ((32_768, 60_999), range(20_000, 32_768)),
        ((49_152, 65_535), range(20_000, 49_152)),
        ((1_024, 40_000), range(40_001, 65_536)),
        ((1_024, 65_535), range(20_000, 65_536)),
    ],
)
def test_meeting_ports_lie_outside_the_ephemeral_range_where_there_is_room(ephemeral, expected):
    assert ports.meeting_ports(ephemeral) == expected


def test_a_port_in_use_on_any_interface_is_passed_over(monkeypatch):
    with socket.socket() as taken, socket.socket() as spare:
        for one in (taken, spare):
            one.bind(("127.0.0.1", 0))
        busy, free = taken.getsockname()[1], spare.getsockname()[1]
        spare.close()
        monkeypatch.setattr(ports, "meeting_ports", lambda _: [busy, free])
        assert {ports.free_port() for _ in range(20)} == {free}


def test_without_a_free_port_the_error_says_what_was_tried(monkeypatch):
    monkeypatch.setattr(ports, "_is_free", lambda _: False)
    with pytest.raises(OSError, match=r"none of 100 ports drawn from \d+-\d+ is free"):
        ports.free_port()

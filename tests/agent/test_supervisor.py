"""What a service manager hears, on the real socket that it would listen on."""

from __future__ import annotations

import os
import socket

import pytest

from agent.supervisor import Supervisor


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(5)
        yield listening


def test_it_hears_that_the_agent_serves_lives_and_ends(manager):
    supervisor = Supervisor({"NOTIFY_SOCKET": manager.getsockname()})
    supervisor.ready("serves on\nport 9836")
    supervisor.alive()
    supervisor.stopping("told to")
    assert [manager.recv(1000) for _ in range(3)] == [
        b"READY=1\nSTATUS=serves on port 9836",
        b"WATCHDOG=1",
        b"STOPPING=1\nSTATUS=told to",
    ]


def test_an_abstract_address_is_reached():
    name = f"warpwatch-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name)
        listening.settimeout(5)
        Supervisor({"NOTIFY_SOCKET": f"@{name}"}).alive()
        assert listening.recv(100) == b"WATCHDOG=1"


def test_a_manager_that_is_gone_or_does_not_read_stops_nothing(manager, tmp_path):
    Supervisor({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).alive()
    deaf = Supervisor({"NOTIFY_SOCKET": manager.getsockname()})
    for _ in range(10_000):  # far more than the queue of a socket holds
        deaf.alive()
    Supervisor({}).ready("nobody asked")


@pytest.mark.parametrize(
    ("environment", "period_s"),
    [
        ({"WATCHDOG_USEC": "60000000"}, 20.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 20.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),  # meant for another process
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_signs_of_life_are_three_times_as_often_as_asked_for(environment, period_s):
    assert Supervisor({"NOTIFY_SOCKET": "/nowhere", **environment}).sign_period_s == period_s


def test_without_a_socket_nobody_waits_for_signs_of_life():
    assert Supervisor({"WATCHDOG_USEC": "60000000"}).sign_period_s is None

"""The network sampler on real interfaces: a veth pair between two network namespaces, with counted traffic.

Needs root, the program ip (Debian: iproute2) and a kernel with veth; skips with the reason where one is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.programs import wait_for

ROOT = Path(__file__).parents[2]
#: Ethernet, IPv4 and UDP headers of a datagram; the counters hold no checksum of the frame.
HEADER_BYTES = 14 + 20 + 8
#: Runs inside a namespace: for each line of input, one tick of the sampler as a line of JSON.
PROBE = """
import dataclasses, json, sys
from agent.clock import Instant
from agent.samplers.net_dev import NetDevSampler

sampler = NetDevSampler()
for tick, _ in enumerate(sys.stdin):
    records = sampler.sample(Instant(5.0 * tick, 5.0 * tick))
    print(json.dumps([{"kind": type(r).__name__, **dataclasses.asdict(r)} for r in records]), flush=True)
"""
#: Sends datagrams of given sizes to the other end, which has a socket for them.
SEND = """
import socket, sys

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    for size in map(int, sys.argv[2:]):
        sender.sendto(bytes(size), (sys.argv[1], 9999))
"""
#: Takes as many datagrams as it was told and says how many bytes they held.
RECEIVE = """
import socket, sys

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    receiver.settimeout(20)
    receiver.bind((sys.argv[1], 9999))
    print("ready", flush=True)
    print(sum(len(receiver.recv(65536)) for _ in range(int(sys.argv[2]))), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """A network namespace with one end of the pair, called `interface`, and an address."""

    name: str
    address: str
    interface: str = "rail0"

    def ip(self, *words: str) -> str:
        return _ip("-n", self.name, *words)

    def command(self, program: str, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, sys.executable, "-c", program, *words]

    @property
    def hardware_address(self) -> str:
        return str(json.loads(self.ip("-json", "link", "show", self.interface))[0]["address"])


class Probe:
    """The sampler in a process of a namespace."""

    def __init__(self, namespace: Namespace) -> None:
        self._process = subprocess.Popen(
            namespace.command(PROBE), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def tick(self) -> dict[str, dict[str, Any]]:
        """Return the records of one tick by kind; the only interface that may count is ours."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        records = json.loads(self._process.stdout.readline())
        assert {record["device"] for record in records} == {"rail0"}
        assert len(records) == 2
        return {record["kind"]: record for record in records}

    def link_when(self, is_up: bool) -> dict[str, Any]:
        """Return the record of the link once it says so: the kernel settles the state within a second or two."""
        wait_for(f"is_up {is_up}", lambda: self.tick()["NetworkLink"]["is_up"] is is_up)
        return self.tick()["NetworkLink"]

    def close(self) -> None:
        self._process.communicate(timeout=20)
        assert self._process.returncode == 0


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture
def pair() -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces joined by a veth pair on which nothing is sent but what the test sends."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    ends = tuple(
        Namespace(name=f"warpwatch-test-{os.getpid()}-{number}", address=f"192.0.2.{number}") for number in (1, 2)
    )
    near, far = ends
    made = []
    try:
        try:
            for end in ends:
                _ip("netns", "add", end.name)
                made.append(end)
            near.ip("link", "add", "rail0", "type", "veth", "peer", "name", "rail0", "netns", far.name)
        except OSError as error:  # no program ip, or a kernel or container without namespaces or veth
            pytest.skip(f"no veth pair can be made here: {error}")
        for end, other in ((near, far), (far, near)):
            # Otherwise the kernel announces IPv6 addresses by itself, and asks for the other's hardware address.
            _ip("netns", "exec", end.name, "sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")
            end.ip("address", "add", f"{end.address}/24", "dev", "rail0")
            end.ip("link", "set", "rail0", "up")
            end.ip("neighbour", "add", other.address, "lladdr", other.hardware_address, "dev", "rail0")
        yield near, far
    finally:
        for end in made:
            _ip("netns", "delete", end.name)


@pytest.fixture
def probes(pair: tuple[Namespace, Namespace]) -> Iterator[list[Probe]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Probe(end))) for end in pair]


#: What grows on a link on which nothing is sent.
SILENT = dict.fromkeys(
    (f"{side}_{what}_total" for side in ("receive", "transmit") for what in ("bytes", "packets", "errors", "drops")), 0
)


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after if name.endswith("_total")}


def send(near: Namespace, far: Namespace, sizes: list[int]) -> None:
    receiver = subprocess.Popen(
        far.command(RECEIVE, far.address, str(len(sizes))), stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert receiver.stdout
        assert receiver.stdout.readline() == "ready\n"
        subprocess.run(near.command(SEND, far.address, *map(str, sizes)), check=True, timeout=20, cwd=ROOT)
        assert int(receiver.communicate(timeout=30)[0]) == sum(sizes)
    finally:
        receiver.kill()
        receiver.communicate()


def test_counters_are_what_was_sent(pair: tuple[Namespace, Namespace], probes: list[Probe]) -> None:
    """300 datagrams of 1,000 bytes and 50 of 18: 350 packets, 300,900 + 350 x 42 = 315,600 bytes, at both ends."""
    before = [probe.tick()["NetworkSample"] for probe in probes]
    sizes = [1000] * 300 + [18] * 50
    send(*pair, sizes)
    after = [probe.tick()["NetworkSample"] for probe in probes]
    traffic = sum(sizes) + len(sizes) * HEADER_BYTES
    assert traffic == 315_600
    sent, received = (grown(*readings) for readings in zip(before, after, strict=True))
    assert sent == {**SILENT, "transmit_bytes_total": traffic, "transmit_packets_total": 350}
    assert received == {**SILENT, "receive_bytes_total": traffic, "receive_packets_total": 350}


def test_link_follows_the_cable(pair: tuple[Namespace, Namespace], probes: list[Probe]) -> None:
    """A veth says 10 Gbit/s, 1.25 GB/s; when the other end is switched off it has no carrier and tells no speed."""
    near, far = pair
    probe = probes[0]
    first = probe.link_when(is_up=True)
    assert (first["is_up"], first["speed_bytes_per_second"], first["is_default_route"]) == (True, 1.25e9, False)
    near.ip("route", "add", "default", "via", far.address, "metric", "100")
    assert probe.tick()["NetworkLink"]["is_default_route"] is True
    far.ip("link", "set", "rail0", "down")
    down = probe.link_when(is_up=False)
    assert (down["is_up"], down["speed_bytes_per_second"]) == (False, None)
    assert down["carrier_changes_total"] == first["carrier_changes_total"] + 1
    far.ip("link", "set", "rail0", "up")
    again = probe.link_when(is_up=True)
    assert (again["is_up"], again["speed_bytes_per_second"]) == (True, 1.25e9)
    assert again["carrier_changes_total"] == first["carrier_changes_total"] + 2
    # Switched off at this end: its route goes with it, and the kernel answers EINVAL for the carrier.
    near.ip("link", "set", "rail0", "down")
    off = probe.link_when(is_up=False)
    assert (off["is_up"], off["speed_bytes_per_second"], off["is_default_route"]) == (False, None, False)


def test_what_is_lost_shows_as_drops(pair: tuple[Namespace, Namespace], probes: list[Probe]) -> None:
    """Five datagrams of 1,000 bytes to an end that takes 576: veth drops them and counts that at both ends."""
    near, far = pair
    far.ip("link", "set", "rail0", "mtu", "576")
    before = [probe.tick()["NetworkSample"] for probe in probes]
    subprocess.run(near.command(SEND, far.address, *["1000"] * 5), check=True, timeout=20, cwd=ROOT)
    after = [probe.tick()["NetworkSample"] for probe in probes]
    sent, received = (grown(*readings) for readings in zip(before, after, strict=True))
    assert sent == {**SILENT, "transmit_drops_total": 5}
    assert received == {**SILENT, "receive_drops_total": 5}

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.clock import ManualClock
from agent.owners.holders import PodOwner
from agent.pod_resources.answers import DEVICES_MAX, NAME_LENGTH_MAX, OWNERS_MAX, read_allocatable, read_list
from agent.pod_resources.client import PodResources, PodResourcesConfig
from agent.pod_resources.wire import Reader, WireError
from tests.pod_resources_server import ROOT, Kubelet, container, generated_messages, pod

pytest.importorskip("grpc", reason="the extra warpwatch[kubernetes] is not installed")
pytest.importorskip("grpc_tools", reason="the test server is generated with grpcio-tools")

CARD_0 = "GPU-00000000-1111-2222-3333-444444444444"
CARD_1 = "GPU-00000001-1111-2222-3333-444444444444"
SLICE_0 = "MIG-0000000a-1111-2222-3333-444444444444"
SLICE_1 = "MIG-0000000b-1111-2222-3333-444444444444"


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    return generated_messages(tmp_path_factory.mktemp("generated"))[0]


@pytest.fixture
def kubelet(tmp_path):
    with Kubelet(tmp_path) as kubelet:
        yield kubelet


@pytest.fixture
def clock():
    return ManualClock(1000.0)


@pytest.fixture
def ask(clock):
    """Return a client of a socket, closed at the end."""
    clients = []

    def client(socket: Path, **tunables) -> PodResources:
        # A busy machine may take longer than the kubelet is given; tests of the deadline set their own.
        config = PodResourcesConfig(**{"socket": socket, "deadline_s": 60.0, **tunables})
        clients.append(PodResources(config, clock))
        return clients[-1]

    yield client
    for each in clients:
        each.close()


def eventually(is_so, seconds: float = 20.0) -> bool:
    """Wait for another process or thread."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# What is read from the answers of a real server.


def test_pods_are_named_by_the_uuid_of_their_gpus(kubelet, ask):
    worker = container("trainer", CARD_0, CARD_1)
    kubelet.answer([pod("research", "llama-0", worker, {"name": "sidecar", "cpu_ids": [1, 2, 300]})])
    client = ask(kubelet.socket)
    assert client.pods() is None  # nobody asked yet
    assert client.refresh()
    owner = PodOwner("research", "llama-0", "trainer")
    assert client.pods() == {CARD_0: (owner,), CARD_1: (owner,)}
    assert client.unseen is None
    assert client.left_out == 0


def test_a_node_without_pods_is_seen_and_empty(kubelet, ask):
    client = ask(kubelet.socket)
    client.refresh()
    assert client.pods() == {}


def test_mig_instances_are_named_apart_from_their_card(kubelet, ask):
    old = f"MIG-{CARD_1}/7/0"  # as drivers before R470 name them
    first, second = container("a", SLICE_0, resource="nvidia.com/mig-1g.10gb"), container("b", SLICE_1.upper())
    kubelet.answer([pod("n", "p", first, second), pod("n", "q", container("c", old))])
    client = ask(kubelet.socket)
    client.refresh()
    assert client.pods() == {
        SLICE_0: (PodOwner("n", "p", "a"),),
        SLICE_1: (PodOwner("n", "p", "b"),),
        old: (PodOwner("n", "q", "c"),),
    }


def test_replicas_of_a_shared_gpu_are_that_gpu(kubelet, ask):
    kubelet.answer(
        [
            pod("team", "b", container("main", f"{CARD_0}::7", resource="nvidia.com/gpu.shared")),
            pod("team", "a", container("main", f"{CARD_0}::0", f"{CARD_0}::12", resource="nvidia.com/gpu.shared")),
            pod("team", "c", container("main", f"{SLICE_0}::1")),
        ]
    )
    client = ask(kubelet.socket)
    client.refresh()
    assert client.pods() == {
        CARD_0: (PodOwner("team", "a", "main"), PodOwner("team", "b", "main")),
        SLICE_0: (PodOwner("team", "c", "main"),),
    }


def test_other_devices_are_passed_over(kubelet, ask, caplog):
    kubelet.answer(
        [
            pod("n", "amd", container("c", "0000:03:00.0", resource="amd.com/gpu")),
            pod("n", "nic", container("c", "mlx5_0", resource="rdma/hca")),
            pod("n", "fake", container("c", "GPU-0", "MIG-7", "GPU-", resource="example.org/GPU-like")),
            pod("n", "own", container("c", CARD_0, resource="example.org/gpu")),
        ]
    )
    client = ask(kubelet.socket)
    client.refresh()
    assert client.pods() == {CARD_0: (PodOwner("n", "own", "c"),)}
    assert "UUID" not in caplog.text


def test_gpus_named_by_their_number_are_not_guessed_and_that_is_said_once(kubelet, ask, caplog):
    kubelet.answer([pod("n", "p", container("c", "nvidia0", "nvidia1"))])
    client = ask(kubelet.socket)
    client.refresh()
    client.refresh()
    assert client.pods() == {}
    assert caplog.text.count("use a device plugin that gives GPUs away by UUID") == 1
    assert "'nvidia0'" in caplog.text


def test_claims_count_where_a_uuid_is_in_a_name(kubelet, ask):
    def claimed(name: str, **resource) -> dict:
        claim = {"claim_name": "gpus", "claim_namespace": "n", "claim_resources": [resource]}
        return pod("n", name, {"name": "c", "dynamic_resources": [claim]})

    kubelet.answer(
        [
            claimed("by-cdi", cdi_devices=[{"name": f"nvidia.com/gpu={CARD_0}"}]),
            claimed("by-device", driver_name="x", pool_name="node", device_name=CARD_1.lower()),
            claimed("by-pool", driver_name="x", pool_name=f"node/{SLICE_0}", device_name="0"),
            claimed(
                "number", driver_name="example.org", cdi_devices=[{"name": "nvidia.com/gpu=0"}], device_name="gpu-0"
            ),
            # The UID of a claim is no UUID of a GPU, nor is a longer name's middle.
            claimed("claim", cdi_devices=[{"name": f"k8s.gpu.nvidia.com/claim={CARD_0[4:]}-gpu-0"}]),
            claimed("longer", cdi_devices=[{"name": f"example.org/x={SLICE_1}0"}, {"name": f"example.org/v{SLICE_1}"}]),
        ]
    )
    client = ask(kubelet.socket)
    client.refresh()
    assert client.pods() == {
        CARD_0: (PodOwner("n", "by-cdi", "c"),),
        CARD_1: (PodOwner("n", "by-device", "c"),),
        SLICE_0: (PodOwner("n", "by-pool", "c"),),
    }


def test_claims_that_name_gpus_by_number_are_said_once(kubelet, ask, caplog):
    resource = {"driver_name": "gpu.nvidia.com", "pool_name": "node", "device_name": "gpu-3"}
    kubelet.answer([pod("n", "p", {"name": "c", "dynamic_resources": [{"claim_resources": [resource]}]})])
    client = ask(kubelet.socket)
    client.refresh()
    assert client.pods() == {}
    assert "'gpu-3'" in caplog.text


def test_names_of_any_kind_arrive_as_bounded_text(kubelet, ask):
    names = ['a"} 1\nup{x="', "\0\x1b[31m\u202e", "模型-🚀", "x" * 10_000, ""]
    kubelet.answer([pod(name, name, container(name, CARD_0)) for name in names])
    client = ask(kubelet.socket)
    client.refresh()
    expected = [name[:NAME_LENGTH_MAX] for name in names]
    assert client.pods() == {CARD_0: tuple(sorted(PodOwner(name, name, name) for name in expected))}


def test_what_can_be_given_away_is_known_too(kubelet, ask):
    kubelet.answer([], [{"resource_name": "nvidia.com/gpu", "device_ids": [f"{CARD_0}::0", f"{CARD_0}::1", "nvidia1"]}])
    client = ask(kubelet.socket)
    client.refresh()
    assert client.allocatable() == {CARD_0}
    client.refresh()  # asks for the list only
    assert client.allocatable() == {CARD_0}


def test_a_kubelet_that_knows_lists_only_still_names_pods(tmp_path, ask, caplog):
    with Kubelet(tmp_path, "--list-only") as kubelet:
        kubelet.answer([pod("n", "p", container("c", CARD_0))])
        client = ask(kubelet.socket)
        client.refresh()
        assert client.pods() == {CARD_0: (PodOwner("n", "p", "c"),)}
        assert client.allocatable() is None
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_five_thousand_pods(kubelet, ask):
    """Eight of them hold a GPU; the rest cost next to nothing."""
    pods = [pod("n", f"pod-{n}", {"name": "c", "cpu_ids": [n]}) for n in range(5000)]
    for n in range(8):
        pods[n * 600] = pod("n", f"gpu-{n}", container("c", f"GPU-{n:08x}-1111-2222-3333-444444444444"))
    kubelet.answer(pods)
    client = ask(kubelet.socket)
    client.refresh()
    found = client.pods()
    assert found is not None
    assert [owner.pod for (owner,) in found.values()] == [f"gpu-{n}" for n in range(8)]


def test_an_answer_beyond_the_size_is_refused(kubelet, ask, caplog):
    kubelet.answer([pod("n", "p" * 2000, container("c", CARD_0))])
    client = ask(kubelet.socket, answer_bytes_max=1000)
    client.refresh()
    assert client.pods() is None
    assert client.unseen == "too much"
    assert "larger" in caplog.text


# A kubelet that is not there, hangs, dies.


def test_the_last_answer_holds_for_a_minute(kubelet, ask, clock, caplog):
    kubelet.answer([pod("n", "p", container("c", CARD_0))])
    client = ask(kubelet.socket)
    client.refresh()
    kubelet.kill()
    clock.advance(60.0)
    client.refresh()
    client.refresh()
    assert client.unseen == "not listening"
    assert caplog.text.count("may be restarting") == 1
    assert client.pods() == {CARD_0: (PodOwner("n", "p", "c"),)}
    clock.advance(0.1)
    assert client.pods() is None
    assert client.allocatable() is None

    kubelet.answer([pod("n", "other", container("c", CARD_1))])
    kubelet.start()
    client.refresh()
    assert client.unseen is None
    assert client.pods() == {CARD_1: (PodOwner("n", "other", "c"),)}


def test_a_frozen_kubelet_costs_its_deadline_and_nobody_else(kubelet, ask):
    kubelet.answer([pod("n", "p", container("c", CARD_0))])
    client = ask(kubelet.socket, deadline_s=0.3)
    assert eventually(lambda: client.refresh() and client.unseen is None)
    kubelet.freeze()
    began = time.monotonic()
    client.refresh()
    # 0.3 s for the first call, which is the last one; the rest is for a busy machine.
    assert 0.3 <= time.monotonic() - began < 5.0
    assert client.unseen == "no answer in time"
    assert client.pods() == {CARD_0: (PodOwner("n", "p", "c"),)}
    kubelet.thaw()
    assert eventually(lambda: client.refresh() and client.unseen is None)


def test_others_do_not_wait_for_a_call_in_flight_and_close_ends_it(tmp_path, ask, caplog):
    with Kubelet(tmp_path, "--hang") as kubelet:
        client = ask(kubelet.socket, deadline_s=600.0)
        threads = threading.active_count()
        client.start()
        assert eventually(lambda: client._transport is not None)
        began = time.monotonic()
        assert client.pods() is None
        client.close()
        assert eventually(lambda: threading.active_count() <= threads)
        assert time.monotonic() - began < 10.0
    # What the agent did itself is no trouble of the kubelet.
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_socket_that_appears_later_is_found(tmp_path, ask, caplog):
    caplog.set_level(logging.INFO)
    kubelet = Kubelet(tmp_path)
    kubelet.answer([pod("n", "p", container("c", CARD_0))])
    client = ask(kubelet.socket, refresh_s=0.05)
    client.start()
    assert eventually(lambda: client.unseen == "absent")
    assert client.pods() is None
    with kubelet:
        assert eventually(lambda: client.pods() is not None)
    assert caplog.text.count("is not there") == 1


@pytest.mark.parametrize(
    ("code", "reason", "says"),
    [
        ("UNIMPLEMENTED", "too old", "Kubernetes 1.20"),
        ("INTERNAL", "refused: INTERNAL", "as the test wants it"),
        ("RESOURCE_EXHAUSTED", "too much", "as the test wants it"),
    ],
)
def test_a_refusal_is_said_with_its_code(tmp_path, ask, caplog, code, reason, says):
    with Kubelet(tmp_path, "--code", code) as kubelet:
        client = ask(kubelet.socket)
        assert client.refresh()
        assert client.refresh()
    assert client.pods() is None
    assert client.unseen == reason
    assert caplog.text.count(says) == 1
    assert len(caplog.text) < 600  # the server's own words are long


def test_bytes_that_are_no_answer_are_refused_and_bad_text_is_escaped(tmp_path, ask, caplog):
    raw = tmp_path / "raw"
    raw.write_bytes(b"\x0a\x7fshort")
    with Kubelet(tmp_path, "--raw", str(raw)) as kubelet:
        client = ask(kubelet.socket)
        client.refresh()
        assert client.unseen == "unreadable"
        assert "not of the interface v1" in caplog.text

        def field(number: int, value: bytes) -> bytes:
            return bytes([number << 3 | 2, len(value)]) + value

        # Names that are not UTF-8, which no library would write.
        devices = field(2, CARD_0.encode())
        body = field(1, b"p\xff") + field(2, b"n\xc3") + field(3, field(1, b"\x80c") + field(2, devices))
        raw.write_bytes(field(1, body))
        client.refresh()
        assert client.pods() == {CARD_0: (PodOwner("n\\xc3", "p\\xff", "\\x80c"),)}


def test_a_path_with_signs_that_mean_something_in_addresses(tmp_path, ask):
    folder = tmp_path / "50%20 ?#ü"
    folder.mkdir()
    with Kubelet(tmp_path) as kubelet:
        strange = folder / "kubelet.sock"
        strange.symlink_to(kubelet.socket)
        client = ask(strange)
        client.refresh()
        assert client.pods() == {}


def test_what_is_no_socket_is_said(tmp_path, ask, caplog):
    client = ask(tmp_path)
    client.refresh()
    assert client.unseen == "unusable"
    assert f"{tmp_path} is not a socket; correct socket in [pod_resources]" in caplog.text
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    client = ask(loop)
    client.refresh()
    assert client.unseen == "unusable"
    assert "cannot be looked at: Too many levels of symbolic links" in caplog.text


def test_a_path_too_long_for_a_socket_is_said(kubelet, tmp_path, ask, caplog):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    (folder / "kubelet.sock").symlink_to(kubelet.socket)
    client = ask(folder / "kubelet.sock")
    assert client.refresh()
    assert client.pods() is None
    assert client.unseen == "unusable"
    assert "longer than the path of a socket can be" in caplog.text


# Programs of their own: another user, no grpcio, what gRPC does to the process.

_PROGRAM = """
import logging, os, sys
from pathlib import Path
from agent.clock import SystemClock
from agent.pod_resources.client import PodResources, PodResourcesConfig
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
client = PodResources(PodResourcesConfig(socket=Path(sys.argv[1]), deadline_s=60.0), SystemClock())
"""


def run(socket: Path, program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROGRAM + program, str(socket)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", ["socket", "folder"])
def test_a_user_without_permission_is_told_once_and_loads_nothing(open_path, closed):
    folder = open_path / "pod-resources"
    folder.mkdir()
    with Kubelet(open_path, socket=folder / "kubelet.sock") as kubelet:
        kubelet.socket.chmod(0o600 if closed == "socket" else 0o777)
        folder.chmod(0o755 if closed == "socket" else 0o700)
        # The interpreter may be closed to that user as well, so it is left behind after it has started.
        program = """
os.setgroups([]); os.setgid(65534); os.setuid(65534)
assert client.refresh() and client.refresh()
print(client.unseen, client.pods(), "grpc" in sys.modules)
"""
        done = run(kubelet.socket, program)
    assert done.stderr == ""
    said, result = done.stdout.splitlines()
    assert said.startswith("WARNING")
    assert "is closed to this user; run the agent as root" in said
    assert result == "forbidden None False"


def test_without_grpcio_the_next_step_is_said_once(kubelet):
    program = """
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "grpc":
            raise ModuleNotFoundError("No module named 'grpc'", name="grpc")
sys.meta_path.insert(0, Missing())
client.start()
client._thread.join(20)  # asking again cannot help
print(client._thread.is_alive(), client.refresh(), client.pods())
"""
    done = run(kubelet.socket, program)
    assert done.stderr == ""
    said, result = done.stdout.splitlines()
    assert said.startswith("WARNING")
    assert "No module named 'grpc'" in said
    assert "install warpwatch[kubernetes]" in said
    assert result == "False False None"


def test_nothing_is_loaded_where_there_is_no_socket(tmp_path):
    done = run(tmp_path / "kubelet.sock", "client.refresh(); print('grpc' in sys.modules)")
    said, result = done.stdout.splitlines()
    assert said.startswith("INFO")
    assert "pod_resources = false in [owners]" in said
    assert result == "False"


def test_what_grpc_takes_of_the_memory_stays_known(kubelet):
    """The agent has 80 MB. Measured on x86-64 with grpcio 1.85: 14 MB, 11 of them pages of its library's file."""
    program = """
def resident_kb():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])
before = resident_kb()
for _ in range(20):
    client.refresh()
print(resident_kb() - before)
"""
    assert int(run(kubelet.socket, program).stdout.splitlines()[-1]) < 24_000


def test_grpc_neither_forks_nor_writes_to_standard_error(kubelet):
    program = """
import contextlib, subprocess
client.refresh()
children = []
for task in os.listdir("/proc/self/task"):
    with contextlib.suppress(OSError):  # gRPC's threads come and go
        children.append(Path(f"/proc/self/task/{task}/children").read_text())
subprocess.run([sys.executable, "-c", ""], check=True, close_fds=False, preexec_fn=lambda: None)  # forks
client.refresh()
print(client.pods(), "".join(children))
os.kill(int(sys.stdin.readline()), 19)  # SIGSTOP
hasty = PodResources(PodResourcesConfig(socket=Path(sys.argv[1]), deadline_s=0.2), SystemClock())
hasty.refresh()
print(hasty.unseen)
"""
    assert kubelet.process is not None
    command = [sys.executable, "-c", _PROGRAM + program, str(kubelet.socket)]
    given_in = f"{kubelet.process.pid}\n"
    done = subprocess.run(command, cwd=ROOT, input=given_in, capture_output=True, text=True, timeout=60, check=True)
    kubelet.kill()
    assert done.stderr == ""
    assert [line for line in done.stdout.splitlines() if "named" not in line] == ["{} ", "no answer in time"]


# The reader against protoc's.

_TEXT = st.text(max_size=12)
_DEVICES = st.sampled_from([CARD_0, CARD_1, SLICE_0, f"{CARD_1}::3", "nvidia0", "x"])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(_TEXT, _TEXT, _TEXT, st.lists(_DEVICES, max_size=4), st.lists(st.integers(0, 2**40))), max_size=6
    )
)
def test_the_reader_agrees_with_generated_code(messages, pods):
    answer = messages.ListPodResourcesResponse()
    expected: dict[str, set[PodOwner]] = {}
    for namespace, name, container_name, devices, cpus in pods:
        written = answer.pod_resources.add(namespace=namespace, name=name).containers.add(
            name=container_name, cpu_ids=cpus
        )
        written.devices.add(resource_name="example.org/gpu", device_ids=devices)
        for device in devices:
            if device.startswith(("GPU-", "MIG-")):
                owner = PodOwner(namespace, name, container_name)
                expected.setdefault(device.removesuffix("::3"), set()).add(owner)
    found = read_list(answer.SerializeToString()).owners
    assert {device: set(owners) for device, owners in found.items()} == expected


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 255))
def test_no_bytes_raise_anything_but_that_they_are_no_message(messages, noise, place, byte):
    answer = messages.ListPodResourcesResponse()
    holder = answer.pod_resources.add(namespace="n", name="p").containers.add(name="c")
    holder.devices.add(resource_name="nvidia.com/gpu", device_ids=[CARD_0, SLICE_0])
    good = bytearray(answer.SerializeToString())
    good[place % len(good)] = byte
    for data in (bytes(good), bytes(good[:place]), noise):
        for read in (read_list, read_allocatable):
            with contextlib.suppress(WireError):
                read(data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x0a", "number that does not end"),
        (b"\x08" + b"\xff" * 10 + b"\x01", "number that does not end"),  # 64 bits are ten bytes at most
        (b"\x0a\x05abcd", "ends within a field"),
        (b"\x09abc", "ends within a field"),
        (b"\x02\x00", "without a number"),
        (b"\x0b\x0c", "unknown type 3"),
    ],
)
def test_what_no_message_is(data, says):
    with pytest.raises(WireError, match=says):
        Reader().parts(data, 1)


def test_fields_of_other_types_are_skipped():
    # 1: varint 300, 2: fixed64, 3: fixed32, 4: "ab", 1: "c"
    data = b"\x08\xac\x02" + b"\x11" + b"\0" * 8 + b"\x1d" + b"\0" * 4 + b"\x22\x02ab" + b"\x0a\x01c"
    assert Reader().parts(data, 4, 1) == ([b"ab"], [b"c"])


def test_an_answer_of_empty_fields_is_given_up():
    with pytest.raises(WireError, match="more fields"):
        read_list(b"\x12\x00" * 300_000)


def test_devices_and_owners_are_bounded_and_counted(messages):
    answer = messages.ListPodResourcesResponse()
    holder = answer.pod_resources.add(namespace="n", name="p").containers.add(name="c")
    uuids = [f"GPU-{n:08x}-1111-2222-3333-444444444444" for n in range(DEVICES_MAX + 3)]
    holder.devices.add(resource_name="nvidia.com/gpu", device_ids=uuids)
    for n in range(OWNERS_MAX + 1):  # with the one above, two more than are kept
        shared = answer.pod_resources.add(namespace="n", name=f"q{n}").containers.add(name="c")
        shared.devices.add(resource_name="nvidia.com/gpu", device_ids=[uuids[0]])
    allocation = read_list(answer.SerializeToString())
    assert len(allocation.owners) == DEVICES_MAX
    assert len(allocation.owners[uuids[0]]) == OWNERS_MAX
    assert allocation.left_out == 3 + 2

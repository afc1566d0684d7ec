"""What a recording says about the machine: every record that names a GPU names a stand-in."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from agent.record import Recorder, hash_uuid, recording_header
from agent.records import (
    RECORD_TYPES,
    FilesystemSample,
    GpuKey,
    GpuMigInfo,
    Holder,
    InfinibandPort,
    NetworkLink,
    NetworkSample,
    Record,
    Tick,
)
from agent.trace import TraceWriter

UUID = "GPU-5ec2e7aa-1111-4222-8333-444444444440"
MIG_UUID = "MIG-5ec2e7aa-5555-4666-8777-888888888880"
OLD_MIG_UUID = f"MIG-{UUID}/3/0"
#: A value for every kind of field, by its annotation.
VALUES = {
    "float": 1.5,
    "int": 2,
    "bool": True,
    "str": "word",
    "GpuKey": GpuKey(0, UUID, 3),
    "tuple[str, ...]": ("word",),
    "tuple[float, ...]": (1.0,),
    "tuple[GpuProcess, ...]": (),
    "Mapping[str, float]": {"word": 1.0},
    "Mapping[str, int]": {"word": 1},
    "tuple[Holder, ...]": (Holder(job_key=f"key-{UUID}", job_id=UUID, user=UUID, pod=UUID, scheduler=UUID),),
    "Mapping[int, int]": {79: 1},
    "Mapping[int, float]": {79: 1.0},
}


def filled(cls: type[Record], **changes) -> Record:
    fields = {f.name: VALUES[str(f.type).removesuffix(" | None")] for f in dataclasses.fields(cls)}
    return cls(**{**fields, "monotonic_s": 0.0, "wall_s": 0.0, **changes})


def recorded(tmp_path, *records, identify=False) -> str:
    path = tmp_path / "out.jsonl"
    with TraceWriter(path, recording_header(None, 1.0, ["nvml"])) as writer:
        Recorder(writer, identify=identify).deliver(Tick(monotonic_s=0.0, wall_s=0.0, records=records))
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RECORD_TYPES)
def test_no_record_holds_the_uuid_of_a_gpu(name, tmp_path):
    text = recorded(tmp_path, filled(RECORD_TYPES[name]))
    assert f'"{name}"' in text
    assert "5ec2e7aa" not in text
    if "key" in RECORD_TYPES[name].__dataclass_fields__:
        assert hash_uuid(UUID) in text


NAME = 'ana.miller"<b>'
#: Fields whose text stays, for it is a word of a list, or what a driver says of itself.
ALLOWED = {
    "gpu_info.model_name": "the driver's name of the board",
    "gpu_info.driver_version": "a version",
    "gpu_state.state": "vocabulary.GPU_STATES",
    "gpu_sample.clock_event_reasons": "vocabulary.CLOCK_EVENT_REASONS",
    "gpu_slow_sample.clock_event_seconds_total": "vocabulary.CLOCK_EVENT_REASONS",
    "gpu_limits.fabric_state": "three words of the sampler",
    "gpu_mig_info.profile": "the driver's name of a size",
    "infiniband_port.link_layer": "words of the kernel",
    "infiniband_port.state": "words of the kernel",
    "infiniband_port.counters": "names of the kernel's files",
    "infiniband_port.hw_counters": "names of a list of the sampler",
    "disk_sample.transport": "words of the kernel",
    "filesystem_sample.source": "words of the sampler",
    "process_sample.state": "letters of the kernel",
    "process_sample.program": "words of agent/programs.py",
    "process_sample.declared_class": "vocabulary.CLASSES",
    "gpu_owners.holders.declared_class": "vocabulary.CLASSES",
}


def with_names() -> list[tuple[str, type[Record], dict[str, object]]]:
    """Return every text field of every record, by name, and what the field is filled with."""
    found = []
    for name, cls in RECORD_TYPES.items():
        for field in dataclasses.fields(cls):
            kind = str(field.type).removesuffix(" | None")
            place = f"{name}.{field.name}"
            if kind == "Mapping[str, float]" or kind == "Mapping[str, int]":
                found.append((place, cls, {field.name: {NAME: 1}}))
            elif kind == "tuple[Holder, ...]":
                for part in Holder._fields:
                    if "str" in str(Holder.__annotations__[part]):
                        holders = (Holder(**{"job_key": "k", part: NAME}),)
                        found.append((f"{place}.{part}", cls, {field.name: holders}))
            elif kind == "GpuKey":
                found.append((place, cls, {field.name: GpuKey(0, NAME)}))
            elif kind in ("str", "tuple[str, ...]"):
                found.append((place, cls, {field.name: NAME if kind == "str" else (NAME,)}))
            else:
                # A kind that holds text may not slip through: none of these does.
                assert (
                    kind in ("float", "int", "bool", "tuple[float, ...]", "tuple[GpuProcess, ...]") or "[int," in kind
                )
    return found


@pytest.mark.parametrize(
    ("place", "cls", "fields"), with_names(), ids=lambda value: value if type(value) is str else ""
)
def test_no_text_field_holds_a_name_but_those_of_closed_vocabularies(place, cls, fields, tmp_path):
    text = recorded(tmp_path, filled(cls, **fields))
    assert ("ana.miller" in text) == (place in ALLOWED)


def test_every_field_that_is_allowed_exists():
    assert set(ALLOWED) <= {place for place, _, _ in with_names()}


@pytest.mark.parametrize(
    ("fstype", "kept"),
    [
        ("nfs4", "nfs4"),
        ("lustre", "lustre"),
        ("fuse", "fuse"),
        ("fuse.juicefs", "fuse.juicefs"),
        ("fuse.s3fs", "fuse.s3fs"),
        ('fuse.ana-project"<b>', "fuse"),
        ("fuse.s3fs-ana", "fuse"),
        ("fuse.", "fuse"),
        ("anafs", "other"),
        ("nfs4\n", "other"),
    ],
)
def test_a_type_of_file_system_that_is_not_known_is_not_told(tmp_path, fstype, kept):
    record = filled(FilesystemSample, fstype=fstype)
    assert json.loads(recorded(tmp_path, record).splitlines()[1])["r"]["filesystem_sample"][0]["fstype"] == kept


#: As kernels, udev and drivers name them.
DEVICES = (
    "eth0 eno1 eno12399np0 ens1f0np0 enp65s0f0v1 enP2p3s0 bond0 bond0.100 br0 ib0 ib0.8001 ibp23s0 hsn1 wlp2s0 mlx5_0 "
    "mlx5_bond_0 mlx5_ib3 bnxt_re0 rocep23s0f0 rdmap0s6 efa_0 hfi1_0 nvme0n1 nvme1c0n1 sda sdab vda xvdf mmcblk0 nbd0"
)


@pytest.mark.parametrize("device", DEVICES.split())
def test_names_that_the_kernel_gives_to_devices_are_kept(tmp_path, device):
    assert f'"{device}"' in recorded(tmp_path, filled(NetworkSample, device=device))


@pytest.mark.parametrize(
    "device", ["enx78e7d1ea46da", "storage-ana", "eth0-ana", "ana0", "enp1s0ana", "00000000:05:00.0", ""]
)
def test_names_that_somebody_chose_and_addresses_are_hashed(tmp_path, device):
    """Alike in all records, so that those of one device belong together."""
    records = (filled(NetworkSample, device=device), filled(NetworkLink, device=device))
    text = recorded(tmp_path, *records)
    assert f'"{device}"' not in text
    line = json.loads(text.splitlines()[1])["r"]
    assert line["network_sample"][0]["device"] == line["network_link"][0]["device"]


@pytest.mark.parametrize("mig_uuid", [MIG_UUID, OLD_MIG_UUID])
def test_the_uuid_of_an_instance_is_masked_too(mig_uuid, tmp_path):
    text = recorded(tmp_path, filled(GpuMigInfo, mig_uuid=mig_uuid, profile="1g.10gb"))
    assert "5ec2e7aa" not in text
    assert "1g.10gb" in text
    assert re.search(r'"MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"', text)


def test_the_gpus_near_a_port_are_left_out(tmp_path):
    text = recorded(tmp_path, filled(InfinibandPort, near_gpus=("00000000:1B:00.0",)))
    assert "1B:00.0" not in text


def test_a_mount_point_is_masked(tmp_path):
    text = recorded(tmp_path, FilesystemSample(monotonic_s=0.0, wall_s=0.0, mountpoint="/home/alice", fstype="nfs4"))
    assert "alice" not in text
    assert "nfs4" in text


def test_with_identify_all_is_kept(tmp_path):
    text = recorded(tmp_path, filled(GpuMigInfo, mig_uuid=MIG_UUID), identify=True)
    assert UUID in text
    assert MIG_UUID in text


def test_equal_uuids_stay_equal_and_others_differ():
    assert hash_uuid(UUID) == hash_uuid(UUID)
    assert len({hash_uuid(UUID), hash_uuid(MIG_UUID), hash_uuid(OLD_MIG_UUID)}) == 3

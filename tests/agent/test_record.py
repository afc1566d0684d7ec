"""What a recording says about the machine: every record that names a GPU names a stand-in."""

from __future__ import annotations

import dataclasses
import re

import pytest

from agent.record import Recorder, hash_uuid, recording_header
from agent.records import RECORD_TYPES, FilesystemSample, GpuKey, GpuMigInfo, Holder, InfinibandPort, Record, Tick
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

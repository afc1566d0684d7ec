"""The roster: which GPUs and instances there are, and who holds them, from the records of the NVML sampler."""

from agent.gpu_roster import GpuRoster
from agent.records import GpuInfo, GpuKey, GpuMigInfo, GpuProcess, GpuSample, GpuSlowSample, GpuState, Tick

CARD = GpuKey(0, "GPU-a")
FIRST = GpuKey(0, "GPU-a", 3)


def tick(at_s, *records):
    times = {"monotonic_s": at_s, "wall_s": 1e9 + at_s}
    return Tick(**times, records=tuple(kind(**times, **fields) for kind, fields in records))


def info(key=CARD):
    return GpuInfo, {"key": key, "pci_bus_id": "00000000:1B:00.0", "device": "nvidia4"}


def slow(key, *pids):
    return GpuSlowSample, {"key": key, "processes": tuple(map(GpuProcess, pids))}


def test_a_whole_card_has_its_address_and_its_processes():
    roster = GpuRoster()
    assert roster.gpus == ()
    roster.observe(tick(1, info(), slow(CARD, 100, 101)))
    (gpu,) = roster.gpus
    assert (gpu.key, gpu.pci_bus_id, gpu.device) == (CARD, "00000000:1B:00.0", "nvidia4")
    assert [process.pid for process in gpu.processes] == [100, 101]
    assert not gpu.is_divided


def test_a_list_that_could_not_be_read_is_not_known():
    roster = GpuRoster()
    roster.observe(tick(1, info(), slow(CARD, 100)))
    roster.observe(tick(6, (GpuSlowSample, {"key": CARD, "processes": None})))
    assert roster.gpus[0].processes is None


def test_an_old_list_is_not_known_any_more():
    """The slow tick comes every 5 s: after 15 s without one the list is stale. At 16 s it is 15 s old, at 17 s more."""
    roster = GpuRoster()
    roster.observe(tick(1, info(), slow(CARD, 100)))
    roster.observe(tick(16, info()))
    assert roster.gpus[0].processes is not None
    roster.observe(tick(17, info()))
    assert roster.gpus[0].processes is None


def test_a_card_that_fails_is_marked_with_its_instances_until_it_answers():
    roster = GpuRoster()
    mig = (GpuMigInfo, {"key": FIRST, "profile": "3g.40gb", "mig_uuid": "MIG-1"})
    roster.observe(tick(1, info(), mig, slow(FIRST, 100), (GpuState, {"key": CARD, "state": "ok"})))
    assert [gpu.has_failed for gpu in roster.gpus] == [False, False]
    for at_s, state in enumerate(("hung", "lost", "reset_required"), 2):
        roster.observe(tick(at_s, (GpuState, {"key": CARD, "state": state})))
        assert [gpu.has_failed for gpu in roster.gpus] == [True, True]
    roster.observe(tick(5, (GpuState, {"key": CARD, "state": "ok"})))
    assert [gpu.has_failed for gpu in roster.gpus] == [False, False]


def test_instances_have_the_address_of_their_card():
    roster = GpuRoster()
    mig = (GpuMigInfo, {"key": FIRST, "profile": "3g.40gb", "mig_uuid": "MIG-1"})
    roster.observe(tick(1, info(), mig, slow(FIRST, 100), (GpuSample, {"key": FIRST})))
    card, instance = roster.gpus
    assert card.is_divided
    assert not instance.is_divided
    assert (instance.key, instance.mig_uuid, instance.pci_bus_id) == (FIRST, "MIG-1", "00000000:1B:00.0")
    assert [process.pid for process in instance.processes] == [100]


def test_an_instance_that_is_gone_is_forgotten():
    roster = GpuRoster()
    mig = (GpuMigInfo, {"key": FIRST, "profile": "3g.40gb", "mig_uuid": "MIG-1"})
    roster.observe(tick(1, info(), mig, slow(FIRST, 100)))
    roster.observe(tick(2, (GpuSample, {"key": CARD, "utilization_ratio": 0.5})))
    (card,) = roster.gpus
    assert (card.key, card.is_divided) == (CARD, False)

"""A configuration that is read again: what changes at once, what waits, and what a refused one leaves as it was."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from agent.clock import ManualClock
from agent.config import AgentConfig, Config, ExportConfig, ModelConfig, SamplersConfig
from agent.daemon import Daemon
from agent.errors import UsageError
from agent.reload import Changes, changes, in_force
from classifier.declared import DeclaredConfig
from classifier.detectors.baseline import BaselineConfig
from classifier.detectors.missed_checkpoint import MissedCheckpointConfig
from classifier.detectors.registry import DetectorsConfig
from classifier.detectors.throttled import ThrottledConfig
from classifier.labeller_config import LabellerConfig

OFF = {field.name: False for field in dataclasses.fields(SamplersConfig) if field.name != "expected_gpus"}


@pytest.fixture
def config(tmp_path):
    agent = AgentConfig(state_directory=tmp_path)
    return Config(agent=agent, samplers=SamplersConfig(**OFF), export=ExportConfig(listen="127.0.0.1:0"))


@pytest.fixture
def daemon(config):
    return Daemon(config, ManualClock(1000.0, 1e9))


def by_name(daemon):
    return {detector.anomalies[0]: detector for detector in daemon._pipeline.detectors}


def test_keys_are_told_apart_by_when_they_change(config):
    after = dataclasses.replace(
        config,
        export=dataclasses.replace(config.export, listen=":1", host="full"),
        agent=dataclasses.replace(config.agent, log_level="debug"),
        labels=LabellerConfig(declared=DeclaredConfig(error_ratio=0.2)),
        detectors=DetectorsConfig(
            throttled=ThrottledConfig(enabled=False), baseline=BaselineConfig(settle_seconds=20.0)
        ),
    )
    assert changes(config, config) == Changes((), ())
    assert changes(config, after) == Changes(
        ("agent.log_level", "labels.declared.error_ratio", "detectors.throttled.enabled"),
        ("export.listen", "export.host", "detectors.baseline.settle_seconds"),
    )
    held = in_force(config, after)
    assert changes(config, held).at_start == ()
    assert changes(held, after).at_once == ()


def test_detectors_change_and_those_with_the_same_table_go_on(daemon, config):
    before = by_name(daemon)
    other = dataclasses.replace(
        config,
        detectors=DetectorsConfig(
            throttled=ThrottledConfig(enabled=False), missed_checkpoint=MissedCheckpointConfig(long_factor=5.0)
        ),
    )
    assert daemon.reload(other) == ()
    after = by_name(daemon)
    assert before.keys() - after.keys() == {"throttled"}
    assert {name for name in after if after[name] is not before[name]} == {"missed_checkpoint"}
    assert daemon.reload(config) == ()
    assert by_name(daemon).keys() == before.keys()


def test_what_was_learned_is_handed_over_and_kept(daemon, config):
    old = by_name(daemon)["missed_checkpoint"]
    state = {
        "jobs": {
            "slurm:7": {
                "seen": 1e9, "processes": [], "source": "disk", "intervals": [600.0] * 4, "sizes": [4e9] * 4,
                "lengths": [20.0] * 4, "total": 4, "last": 1e9 - 60, "last_bytes": 4e9,
            }
        }
    }  # fmt: skip
    old.restore(state, daemon._clock.now())
    daemon.reload(
        dataclasses.replace(config, detectors=DetectorsConfig(missed_checkpoint=MissedCheckpointConfig(long_factor=5)))
    )
    new = by_name(daemon)["missed_checkpoint"]
    assert new is not old
    assert new.learned(daemon._clock.now()) == state
    daemon._clock.advance(100.0)
    daemon._learned.keep()
    assert "slurm:7" in (config.agent.state_directory / "learned.json").read_text()


def test_labels_change_where_they_or_the_model_do(daemon, config):
    labeller = daemon._pipeline._labeller
    daemon.reload(config)
    assert daemon._pipeline._labeller is labeller
    daemon.reload(dataclasses.replace(config, labels=LabellerConfig(minimum_s=30.0)))
    assert daemon._pipeline._labeller is not labeller
    assert daemon._pipeline.model is not None


def test_a_bundle_that_does_not_fit_changes_nothing(daemon, config, tmp_path):
    before = daemon._pipeline.detectors
    other = dataclasses.replace(
        config,
        model=ModelConfig(bundle=tmp_path / "absent"),
        detectors=DetectorsConfig(throttled=ThrottledConfig(enabled=False)),
    )
    with pytest.raises(UsageError, match="absent"):
        daemon.reload(other)
    assert daemon._pipeline.detectors == before
    daemon.reload(config)


def test_the_page_says_how_the_last_one_went(daemon, config):
    def successful():
        daemon._take_snapshot()
        return daemon.snapshot().config_reload_successful

    assert successful()
    daemon.refuse_reload()
    assert not successful()
    daemon.reload(config)
    assert successful()


def test_what_waits_for_the_next_start_is_named(daemon, config, caplog):
    caplog.set_level(logging.INFO, "warpwatch")
    other = dataclasses.replace(config, export=dataclasses.replace(config.export, owner_user=True))
    assert daemon.reload(other) == ("export.owner_user",)
    assert "these keys hold from the next start on: export.owner_user" in caplog.text
    assert daemon.reload(other) == ("export.owner_user",), "it does not hold yet"

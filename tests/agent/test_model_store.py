"""Model bundles of a site: installed, refused, rolled back, and gone wrong behind the agent's back."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest

from agent.cli import main
from agent.clock import Instant
from agent.composition import build_pipeline, choose_model
from agent.config import AgentConfig, Config, ModelConfig
from agent.errors import FaultError, UsageError
from agent.model_store import ModelStore
from classifier import model


@pytest.fixture
def bundles(tmp_path):
    """Two bundles that differ from the shipped one, and from each other, in their version."""
    made = []
    for version in ("site-1", "site-2"):
        folder = tmp_path / version
        shutil.copytree(model.BUNDLED, folder)
        about = json.loads((folder / model.JSON_NAME).read_text(encoding="utf-8"))
        (folder / model.JSON_NAME).write_text(json.dumps(about | {"version": version}), encoding="utf-8")
        made.append(folder)
    return made


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def config_of(state):
    return Config(agent=AgentConfig(state_directory=state))


def version_in_use(state):
    return choose_model(config_of(state)).version


def test_the_newest_is_used_and_each_rollback_undoes_the_last_change(state, bundles):
    store = ModelStore(state)
    shipped = model.load().version
    assert version_in_use(state) == shipped
    store.install(bundles[0])
    assert version_in_use(state) == "site-1"
    store.install(bundles[1])
    assert version_in_use(state) == "site-2"
    assert store.rollback().version == "site-1"
    assert version_in_use(state) == "site-1"
    assert store.rollback().version == "site-2"
    assert version_in_use(state) == "site-2"
    assert [(held.place, held.version) for held in store.held()] == [
        ("current", "site-2"),
        ("previous", "site-1"),
        ("shipped", shipped),
    ]


def test_the_first_one_is_rolled_back_to_the_shipped_one_and_again(state, bundles):
    store = ModelStore(state)
    with pytest.raises(UsageError, match="no model bundle is installed"):
        store.rollback()
    store.install(bundles[0])
    assert store.rollback().place == "shipped"
    assert version_in_use(state) == model.load().version
    assert store.rollback().version == "site-1"
    assert version_in_use(state) == "site-1"


def test_the_pipeline_says_which_model_it_uses(state, bundles):
    ModelStore(state).install(bundles[0])
    assert build_pipeline(config_of(state)).snapshot(Instant(1.0, 1e9)).model.version == "site-1"


def test_a_configured_bundle_comes_first(state, bundles):
    ModelStore(state).install(bundles[0])
    config = Config(agent=AgentConfig(state_directory=state), model=ModelConfig(bundle=bundles[1]))
    assert choose_model(config).version == "site-2"
    assert choose_model(config, model.BUNDLED).version == model.load().version


def test_what_does_not_fit_is_refused_and_changes_nothing(state, bundles, tmp_path):
    store = ModelStore(state)
    store.install(bundles[0])
    (bundles[1] / model.ARRAYS_NAME).write_bytes(b"PK")
    with pytest.raises(UsageError, match="SHA-256"):
        store.install(bundles[1])
    with pytest.raises(UsageError, match="cannot read"):
        store.install(tmp_path / "nothing")
    assert version_in_use(state) == "site-1"
    assert len(list((state / "models").iterdir())) == 2  # one bundle and the link to it


def test_an_installed_bundle_that_no_longer_fits_is_said_and_the_shipped_one_used(state, bundles, caplog):
    store = ModelStore(state)
    store.install(bundles[0])
    (store.current() / model.ARRAYS_NAME).write_bytes(b"PK")
    with caplog.at_level(logging.ERROR):
        assert version_in_use(state) == model.load().version
    assert "the shipped model is used until then" in caplog.text
    assert [held.error is None for held in store.held()] == [False, True]


def test_a_third_one_leaves_two(state, bundles):
    store = ModelStore(state)
    for bundle in (*bundles, model.BUNDLED):
        store.install(bundle)
    assert sorted(path.is_symlink() for path in (state / "models").iterdir()) == [False, False, True, True]


def test_installing_the_same_one_twice_keeps_the_one_before(state, bundles):
    store = ModelStore(state)
    for bundle in (*bundles, bundles[1]):
        store.install(bundle)
    assert store.rollback().version == "site-1"


def test_a_link_out_of_the_store_is_none(state, bundles):
    (state / "models").mkdir()
    (state / "models" / "current").symlink_to(bundles[0])
    assert ModelStore(state).current() is None


def test_without_a_state_directory_the_shipped_one_is_used_and_installing_is_one_sentence(tmp_path, bundles):
    assert version_in_use(tmp_path / "nowhere") == model.load().version
    with pytest.raises(FaultError, match=r"cannot write .*nowhere.*: No such file or directory; run this as root"):
        ModelStore(tmp_path / "nowhere").install(bundles[0])


def test_others_may_read_what_is_installed(state, bundles):
    before = os.umask(0o077)
    try:
        ModelStore(state).install(bundles[0])
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in ModelStore(state).current().iterdir()}
    assert set(modes.values()) == {"0o644"}
    assert oct(ModelStore(state).current().stat().st_mode & 0o777) == "0o755"
    assert oct((state / "models").stat().st_mode & 0o777) == "0o755"


def test_the_commands_say_what_they_did(state, bundles, tmp_path, capsys):
    file = tmp_path / "warpwatch.toml"
    file.write_text(f'[agent]\nstate_directory = "{state}"\n', encoding="utf-8")
    options = ("--config", str(file))
    assert main(["model", "install", str(bundles[0]), *options]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("current   version site-1, SHA-256 ")
    assert "systemctl reload warpwatch" in said.err
    assert main(["model", "list", *options]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["current", "shipped"]
    assert main(["model", "rollback", *options]) == 0
    assert capsys.readouterr().out.startswith("shipped ")
    assert main(["model", "install", *options]) == 2
    assert main(["model", "rollback", str(bundles[0]), *options]) == 2


def test_the_list_begins_with_the_one_that_the_configuration_names(state, bundles, tmp_path, capsys):
    file = tmp_path / "warpwatch.toml"
    file.write_text(f'[agent]\nstate_directory = "{state}"\n[model]\nbundle = "{bundles[1]}"\n', encoding="utf-8")
    assert main(["model", "list", "--config", str(file)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["config", "shipped"]

"""Fixtures for all tests: the NVML emulator, in this process and for others."""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from tests.machines import MachineFactory, unpack_machine
from tests.nvml_emulator.emulator import Emulator, build

EmulatorFactory = Callable[[str], Emulator]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the expected pages in fixtures/golden anew")


@pytest.fixture
def open_path(tmp_path: Path) -> Path:
    """Return `tmp_path` as a folder that every user may enter, as pytest's own are not."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(folder.stat().st_mode | 0o055)
    return tmp_path


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> MachineFactory:
    """Return the root of a machine of fixtures/machines by its name; unpacked once, and not to be changed."""
    roots: dict[str, Path] = {}

    def root(name: str) -> Path:
        if name not in roots:
            roots[name] = unpack_machine(name, tmp_path_factory.mktemp(name))
        return roots[name]

    return root


@pytest.fixture(scope="session")
def nvml_emulator_library() -> Path:
    """Path of the folder of the emulator's libnvidia-ml.so.1, built where a source is newer."""
    return build()


@pytest.fixture
def nvml_emulator(
    nvml_emulator_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmulatorFactory]:
    """Make an emulator from a script for this process: nvidia-ml-py finds it, for a library of its name is loaded."""
    ctypes.CDLL(str(nvml_emulator_library / "libnvidia-ml.so.1"))
    made: list[Emulator] = []

    def make(script: str) -> Emulator:
        emulator = Emulator(tmp_path, script)
        for name, value in emulator.variables().items():
            monkeypatch.setenv(name, value)
        made.append(emulator)
        return emulator

    yield make
    for emulator in made:
        emulator.clear()
    # The next test's nvmlInit reads its own script only where nobody holds the library.
    with contextlib.suppress(pynvml.NVMLError):
        while True:
            pynvml.nvmlShutdown()

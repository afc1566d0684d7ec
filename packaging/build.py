"""Builds the Debian and the RPM package from one description, `packaging/nfpm.yaml`.

    make packages                                   # into dist/, for the newest Python of /usr/bin
    .venv/bin/python packaging/build.py --python /usr/bin/python3.12 --out dist

A package holds /opt/warpwatch, an environment of its own for one minor version of the distribution's Python, since
NumPy is compiled for one: build on the distribution that it is for, or name its Python. Needs a Python package index,
and the extra `package` of this project (nfpm, shtab, argparse-manpage).
"""

from __future__ import annotations

import argparse
import compileall
import os
import platform
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = Path("opt/warpwatch")
FORMATS = ("deb", "rpm")
#: Debian's names, from which nfpm makes those of RPM.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
#: Folders of tests in the packages that warpwatch needs: a third of their size, never loaded.
TESTS = re.compile(r"/(?:tests|testing/tests|f2py/tests)$")


def main(argv: Sequence[str] | None = None) -> int:
    """Build the packages and print where they are."""
    arguments = _arguments(argv)
    version = arguments.version or _version()
    with tempfile.TemporaryDirectory(prefix="warpwatch-package-") as name:
        stage = Path(name)
        python = fill_environment(stage, arguments.python)
        write_manual(stage)
        write_completions(stage)
        arguments.out.mkdir(parents=True, exist_ok=True)
        for kind in FORMATS:
            print(pack(stage, kind, arguments.out, python=python, version=version), flush=True)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build the Debian and the RPM package of warpwatch.")
    parser.add_argument(
        "--python",
        type=Path,
        default=Path("/usr/bin/python3"),
        help="the distribution's Python, 3.11 or newer (default: /usr/bin/python3)",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the packages (default: dist)")
    parser.add_argument("--version", help="version of the packages (default: that of pyproject.toml)")
    return parser.parse_args(argv)


def _version() -> str:
    found = re.search(r'^version = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit("pyproject.toml names no version")
    return found[1]


def fill_environment(stage: Path, python: Path) -> str:
    """Make /opt/warpwatch below `stage` and return the name of its Python, such as python3.11."""
    about = "import sys; print(f'python{sys.version_info.major}.{sys.version_info.minor}', sys.version_info >= (3, 11))"
    name, is_new_enough = _output(python, "-c", about).split()
    if is_new_enough != "True":
        raise SystemExit(f"{python} is {name}; warpwatch needs Python 3.11 or newer: name one with --python")
    home = stage / HOME
    _run(python, "-m", "venv", "--without-pip", home)
    # With what a web configuration needs: there is no pip to add it later.
    install = ("install", "--quiet", "--no-compile", f"{ROOT}[web]")
    _run(sys.executable, "-m", "pip", "--python", home / "bin" / name, *install)
    for link in ("python", "python3"):
        (home / "bin" / link).unlink()
        (home / "bin" / link).symlink_to(name)
    (home / "bin" / name).unlink()
    (home / "bin" / name).symlink_to(f"/usr/bin/{name}")
    (home / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nexecutable = /usr/bin/{name}\n", encoding="utf-8"
    )
    _settle(home, name, stage)
    return name


def _settle(home: Path, name: str, stage: Path) -> None:
    """Take out what belongs to the machine of the build, and what is never loaded; compile the rest."""
    for unwanted in (
        "Activate.ps1",
        "activate",
        "activate.csh",
        "activate.fish",
        "f2py",
        "numpy-config",
        "tqdm",
        "waitress-serve",
    ):
        (home / "bin" / unwanted).unlink(missing_ok=True)
    for script in (home / "bin").iterdir():
        if not script.is_symlink():
            first, _, rest = script.read_text(encoding="utf-8").partition("\n")
            if first.startswith("#!"):
                script.write_text(f"#!/{HOME}/bin/{name}\n{rest}", encoding="utf-8")
    site = home / "lib" / name / "site-packages"
    for folder, _, _ in os.walk(site):
        if TESTS.search(folder):
            shutil.rmtree(folder)
    for origin in site.glob("*.dist-info/direct_url.json"):
        origin.unlink()
    _run(home / "bin" / name, "-c", "import numpy")  # the environment works before its files are packed
    # By hash and not by time, which a package may change: the service's user could not write them anew.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(site, quiet=1, stripdir=str(stage), prependdir="/", invalidation_mode=mode)


def write_manual(stage: Path) -> None:
    """Write the manual page, made from the command line itself and packaging/manual.txt."""
    page = stage / "usr/share/man/man1/warpwatch.1"
    page.parent.mkdir(parents=True)
    _run(
        Path(sys.executable).parent / "argparse-manpage",
        *("--module", "agent.cli", "--function", "build_parser", "--prog", "warpwatch", "--project-name", "warpwatch"),
        *("--manual-title", "warpwatch", "--description", "what every GPU of this host is doing, for Prometheus"),
        *("--include", ROOT / "packaging/manual.txt", "--output", page),
    )
    _run("gzip", "-9n", page)


def write_completions(stage: Path) -> None:
    """Write the completions for bash and zsh."""
    sys.path.insert(0, str(ROOT))
    import shtab

    from agent.cli import build_parser

    for shell, path in (
        ("bash", "usr/share/bash-completion/completions/warpwatch"),
        ("zsh", "usr/share/zsh/vendor-completions/_warpwatch"),
    ):
        target = stage / path
        target.parent.mkdir(parents=True)
        target.write_text(shtab.complete(build_parser(), shell), encoding="utf-8")


def pack(stage: Path, kind: str, out: Path, *, python: str, version: str) -> Path:
    """Write the package of one kind into `out` and return its path."""
    environment = os.environ | {
        "WARPWATCH_ARCH": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "WARPWATCH_VERSION": version,
        "WARPWATCH_PYTHON": python,
        "WARPWATCH_STAGE": str(stage),
    }
    nfpm = Path(sys.executable).parent / "nfpm"
    with tempfile.TemporaryDirectory(prefix="warpwatch-packed-") as name:
        command = (nfpm, "package", "--config", "packaging/nfpm.yaml", "--packager", kind, "--target", name)
        subprocess.run(
            [str(word) for word in command], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL
        )
        (packed,) = Path(name).iterdir()
        return Path(shutil.move(packed, out / packed.name))


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True)


def _output(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())

"""The Debian and the RPM package: built, installed, upgraded, rolled back and removed for real.

They go into a view of this machine of which nothing is kept (an overlay in a mount namespace), so that dpkg, rpm and
the scripts of the packages do what they do anywhere. No systemd runs there: that the service is restarted and stopped
is read from the scripts, not seen.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).parents[1]
NEXT = "99.0.0"
PYTHON = Path("/usr/bin/python3")
#: Where the test machine is, seen from inside the view.
INSIDE = "/tmp/warpwatch-packages"
VIEW = """
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o lowerdir=/,upperdir="$1/upper",workdir="$1/work" "$1/root"
mount -t proc proc "$1/root/proc"
mount --bind /dev "$1/root/dev"
mount -t tmpfs tmpfs "$1/root/run"
mount -t tmpfs tmpfs "$1/root/tmp"
mkdir "$1/root{inside}"
mount --bind "$2" "$1/root{inside}"
exec chroot "$1/root" sh -ec "$3"
""".replace("{inside}", INSIDE)


def _is_new_enough(python: Path) -> bool:
    about = "import sys, venv; sys.exit(sys.version_info < (3, 11))"
    return python.exists() and subprocess.run([str(python), "-c", about], check=False).returncode == 0


needs_python = pytest.mark.skipif(not _is_new_enough(PYTHON), reason=f"{PYTHON} is not 3.11 or newer, with venv")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a view of the machine to install into")
needs_dpkg = pytest.mark.skipif(shutil.which("dpkg") is None, reason="no dpkg here")
needs_rpm = pytest.mark.skipif(shutil.which("rpm") is None, reason="no rpm here")


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A folder with both packages of this version, old.deb and old.rpm, and of a later one, new.deb and new.rpm."""
    spec = importlib.util.spec_from_file_location("warpwatch_packaging", ROOT / "packaging/build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    out = tmp_path_factory.mktemp("packages")
    stage = tmp_path_factory.mktemp("stage")
    python = build.fill_environment(stage, PYTHON)
    build.write_manual(stage)
    build.write_completions(stage)
    for kind in build.FORMATS:
        for name, version in (("old", _version()), ("new", NEXT)):
            build.pack(stage, kind, out, python=python, version=version).rename(out / f"{name}.{kind}")
    return out


def _version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


@pytest.fixture
def view(packages, tmp_path) -> functools.partial[str]:
    """Run a shell script in a view of this machine and return what it printed."""
    (tmp_path / "view").mkdir()
    return functools.partial(_run_in_view, tmp_path / "view", packages)


def _run_in_view(folder: Path, packages: Path, script: str) -> str:
    done = subprocess.run(
        ["unshare", "-m", "sh", "-ec", VIEW, "sh", str(folder), str(packages), f"cd {INSIDE}\n{script}"],
        check=False,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LANG": "C.UTF-8"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


#: What holds once either package is installed, before anything was started.
INSTALLED = """
warpwatch --version
warpwatch check-config /etc/warpwatch/warpwatch.toml
id -u warpwatch; getent group warpwatch-jobs
stat -c '%a %U:%G %n' /run/warpwatch /run/warpwatch/agent /run/warpwatch/jobs.d /etc/warpwatch/warpwatch.toml
gzip -t /usr/share/man/man1/warpwatch.1.gz
bash -c '. /usr/share/bash-completion/completions/warpwatch; complete -p warpwatch'
# Nothing was switched on behind anybody's back.
test -z "$(find /etc/systemd -name 'warpwatch*')"
# The service's user runs it from its own environment, and can write nothing there.
touch /tmp/before
setpriv --reuid warpwatch --regid warpwatch --clear-groups --no-new-privs \
    warpwatch run --once | grep -c '^warpwatch_build_info'
test -z "$(find /opt/warpwatch -user warpwatch)"
warpwatch --version >/dev/null
find /opt/warpwatch -newer /tmp/before | wc -l
"""


def _check_installed(printed: str) -> None:
    lines = printed.splitlines()
    assert f"warpwatch {_version()}" in lines
    assert "755 root:root /run/warpwatch" in lines
    assert "755 warpwatch:warpwatch /run/warpwatch/agent" in lines
    assert "1775 root:warpwatch-jobs /run/warpwatch/jobs.d" in lines
    assert "644 root:root /etc/warpwatch/warpwatch.toml" in lines
    assert "complete -o bashdefault -F _shtab_warpwatch warpwatch" in lines
    assert lines[-2:] == ["1", "0"]  # the page was printed, and no byte code had to be written, by root either


@needs_python
@needs_root
@needs_dpkg
def test_debian_package_is_installed_upgraded_rolled_back_and_removed(view):
    printed = view(f"""
dpkg --install old.deb >/dev/null
{INSTALLED}
echo == changed by the administrator, with state and a job file
mkdir -p /var/lib/warpwatch; echo learned > /var/lib/warpwatch/state
echo '[agent]' > /etc/warpwatch/warpwatch.toml
echo '{{}}' > /run/warpwatch/jobs.d/1.json
check() {{
    dpkg-query --show --showformat '${{Version}} ${{Status}}\\n' warpwatch
    cat /var/lib/warpwatch/state /run/warpwatch/jobs.d/1.json /etc/warpwatch/warpwatch.toml
    warpwatch --version >/dev/null
}}
dpkg --install --force-confdef --force-confold new.deb >/dev/null; check
dpkg --install --force-confdef --force-confold old.deb >/dev/null 2>&1; check
dpkg --remove warpwatch >/dev/null
echo == removed; ls -d /opt/warpwatch /usr/bin/warpwatch /usr/lib/systemd/system/warpwatch.service 2>/dev/null || true
cat /etc/warpwatch/warpwatch.toml /var/lib/warpwatch/state /run/warpwatch/jobs.d/1.json
dpkg --purge warpwatch >/dev/null
echo == purged; ls -d /etc/warpwatch/warpwatch.toml /var/lib/warpwatch 2>/dev/null || true
""")
    installed, _, rest = printed.partition("== changed by the administrator, with state and a job file\n")
    _check_installed(installed)
    kept = "learned\n{}\n[agent]\n"
    assert rest == (
        f"{NEXT} install ok installed\n{kept}"
        f"{_version()} install ok installed\n{kept}"
        "== removed\n[agent]\nlearned\n{}\n"
        "== purged\n"
    )


@needs_python
@needs_root
@needs_rpm
def test_rpm_is_installed_upgraded_rolled_back_and_removed(view):
    """With RPM's own tools and scripts; the distribution's packages that it asks for are Debian's here."""
    printed = view(f"""
rpm --install --nodeps old.rpm
{INSTALLED}
echo == changed by the administrator
echo '[agent]' > /etc/warpwatch/warpwatch.toml
rpm --upgrade --nodeps new.rpm; rpm --query warpwatch
rpm --upgrade --oldpackage --nodeps old.rpm; rpm --query warpwatch
cat /etc/warpwatch/warpwatch.toml; warpwatch --version >/dev/null; test -d /run/warpwatch/jobs.d
rpm --erase warpwatch 2>/dev/null
echo == removed; ls -d /opt/warpwatch /usr/bin/warpwatch /etc/warpwatch/warpwatch.toml 2>/dev/null || true
ls /etc/warpwatch
""")
    installed, _, rest = printed.partition("== changed by the administrator\n")
    _check_installed(installed)
    assert rest.splitlines() == [
        f"warpwatch-{NEXT}-1.x86_64",
        f"warpwatch-{_version()}-1.x86_64",
        "[agent]",
        "== removed",
        "warpwatch.toml.rpmsave",
    ]


@needs_python
@needs_rpm
def test_rpm_says_what_it_is(packages):
    def query(*options: str) -> list[str]:
        command = ["rpm", "--query", "--package", *options, str(packages / "old.rpm")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()

    about = query("--queryformat", "%{NAME} %{VERSION} %{LICENSE}")
    assert about == [f"warpwatch {_version()} Apache-2.0"]
    assert query("--configfiles") == ["/etc/warpwatch/warpwatch.toml"]
    (minor,) = {line for line in query("--requires") if line.startswith("python")}
    assert "systemd" in query("--requires")
    files = query("--list")
    assert f"/opt/warpwatch/bin/{minor}" in files
    assert "/usr/share/zsh/site-functions/_warpwatch" in files


@needs_python
@needs_dpkg
def test_packages_hold_nothing_of_the_machine_that_built_them(packages, tmp_path):
    subprocess.run(["dpkg-deb", "--extract", str(packages / "old.deb"), str(tmp_path)], check=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 500
    own = [str(ROOT).encode(), str(packages.parent).encode()]
    for path in files:
        content = path.read_bytes()
        assert not [word for word in own if word in content], path
        assert path.name != "direct_url.json"


@needs_python
@needs_dpkg
def test_manual_names_every_command(packages, tmp_path):
    from agent.cli import build_parser

    subprocess.run(["dpkg-deb", "--extract", str(packages / "old.deb"), str(tmp_path)], check=True)
    page = subprocess.run(
        ["zcat", str(tmp_path / "usr/share/man/man1/warpwatch.1.gz")], check=True, capture_output=True, text=True
    ).stdout.replace("\\-", "-")
    (commands,) = (action.choices for action in build_parser()._actions if isinstance(action.choices, dict))
    assert not [name for name in commands if f"warpwatch {name}" not in page]
    for heading in ("FILES", "EXIT STATUS", "SIGNALS"):
        assert f".SH {heading}" in page

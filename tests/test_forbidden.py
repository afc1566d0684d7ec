"""What the three packages never do: run code from data, start a shell, or trust an assertion for safety."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("agent", "classifier", "exporters")
    for path in (ROOT / package).rglob("*.py")
)
#: Modules that make objects of bytes or start programs.
MODULES = {
    *("cPickle", "dill", "joblib", "marshal", "pickle", "shelve", "cloudpickle"),
    *("code", "codeop", "commands", "multiprocessing", "pty", "runpy", "subprocess"),
    *("xml", "xmlrpc", "lxml"),  # entities that unfold
}
#: Built-in functions that run text, or would.
BUILTINS = {"eval", "exec", "compile", "__import__", "breakpoint", "input"}
#: Functions by the last two parts of their name. YAML is composed into nodes that are never made into objects.
FUNCTIONS = {
    *(f"os.{name}" for name in ("system", "popen", "posix_spawn", "posix_spawnp", "fork", "forkpty")),
    *(f"os.{verb}{kind}" for verb in ("exec", "spawn") for kind in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    *(f"yaml.{name}" for name in ("load", "load_all", "full_load", "unsafe_load", "unsafe_load_all", "safe_load")),
    *("tempfile.mktemp", "os.umask", "importlib.import_module", "asyncio.create_subprocess_shell"),
    *("ssl._create_unverified_context", "random.randbytes", "hashlib.md5", "hashlib.sha1"),
}


def name_of(node: ast.expr) -> str:
    """Return a dotted name, `a.b.c`; only what follows the last call or index where there is one."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return ""


def forbidden(source: str) -> Iterator[str]:
    """Return each thing in the text of a module that may not be there, with its line."""
    for node in ast.walk(ast.parse(source)):
        where = f"line {getattr(node, 'lineno', 0)}: "
        if isinstance(node, ast.Import):
            yield from (where + alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (where + name for name in names if name in FUNCTIONS or node.module.split(".")[0] in MODULES)
        elif isinstance(node, ast.Assert):
            yield where + "assert, which python -O leaves out"
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            if name in BUILTINS or ".".join(name.split(".")[-2:]) in FUNCTIONS:
                yield where + name
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if (keyword.arg, value) in {("shell", True), ("allow_pickle", True), ("verify", False)}:
                    yield where + f"{keyword.arg}={value}"
            if name in {"np.load", "numpy.load"} and not any(k.arg == "allow_pickle" for k in node.keywords):
                yield where + "np.load that does not say allow_pickle=False"


#: Rule files of Prometheus have anchors, and are read by a command, for whoever calls it.
EXCEPTIONS = {"exporters/rule_check.py": "yaml.safe_load"}


@pytest.mark.parametrize("path", FILES)
def test_a_module_does_nothing_forbidden(path):
    found = list(forbidden((ROOT / path).read_text(encoding="utf-8")))
    assert [one for one in found if one.partition(": ")[2] != EXCEPTIONS.get(path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from subprocess import run",
        "from os import system",
        "import os; os.system('x')",
        "eval('1')",
        "exec(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "np.load(file)",
        "np.load(file, allow_pickle=True)",
        "run('x', shell=True)",
        "assert user == 'root'",
    ],
)
def test_what_is_forbidden_is_found(line):
    assert len(list(forbidden(line))) >= 1


#: Calls of NVML whose name says that they change something, and those of them that change what the agent is told alone.
CHANGES = re.compile(r"nvml\w*(?:Set|Reset|Clear|Modify|Create|Destroy|Freeze|Enable|Disable|Register|Free|Alloc)\w*")
OF_ITS_OWN = {
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetCreate",
    "nvmlEventSetFree",
    "nvmlEventSetWait_v2",
    "nvmlGpmSampleAlloc",
    "nvmlGpmSampleFree",
}


@pytest.mark.parametrize("path", [path for path in FILES if path.startswith("agent/")])
def test_no_clock_setting_or_context_of_a_gpu_is_touched(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert set(CHANGES.findall(text)) <= OF_ITS_OWN
    assert not re.search(r"libcuda|cuInit|cuCtx|cudart", text)

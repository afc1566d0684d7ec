"""The table of known programs: how each is recognised, and which class of work it declares.

Only the family word of a row and its class leave this module. The command line that is matched is never kept, logged
or exported: it may hold passwords and names.

Matching is exact, token by token. `grep vllm`, `/data/vllm/train.py` and `vllm-notes.txt` are not vLLM; `python3
/usr/bin/vllm serve`, `python3 -um vllm.entrypoints.api_server` and a process that titles itself `VLLM::Worker_TP0` are.
Names are weak evidence: anybody may choose them. They stand beside the telemetry, never inside the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One row: a family of programs."""

    family: str
    #: What its use says about the work: training, inference or other; None where it is used for anything.
    declared_class: str | None = None
    #: Base names of the program or script, in lower case; `name word` asks for that first argument too.
    commands: tuple[str, ...] = ()
    #: Modules of `python -m`; a module below one of them counts as well.
    modules: tuple[str, ...] = ()
    #: Process titles up to their `::`, in exact case.
    titles: tuple[str, ...] = ()
    #: Main classes of Java programs.
    java_classes: tuple[str, ...] = ()
    #: Thread names that frameworks give to the main thread (comm, 15 characters at most); the weakest sign.
    thread_names: tuple[str, ...] = ()
    #: Whether it starts the programs that do its work, so that those below it are taken for it.
    is_launcher: bool = False


PROGRAMS: Final = (
    # Training.
    Program(
        family="torchrun",
        declared_class="training",
        commands=("torchrun", "torch.distributed.run"),
        modules=("torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic"),
        is_launcher=True,
    ),
    Program(
        family="deepspeed",
        declared_class="training",
        commands=("deepspeed",),
        modules=("deepspeed.launcher",),
        is_launcher=True,
    ),
    Program(
        family="accelerate",
        declared_class="training",
        commands=("accelerate launch", "accelerate-launch"),
        modules=("accelerate.commands.launch",),
        is_launcher=True,
    ),
    Program(
        family="nemo",
        declared_class="training",
        commands=("megatron_gpt_pretraining.py", "megatron_gpt_finetuning.py", "nemo llm"),
        modules=("nemo_run", "nemo.collections.llm"),
        is_launcher=True,
    ),
    Program(
        family="megatron",
        declared_class="training",
        commands=("pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py", "pretrain_mamba.py", "pretrain_vlm.py"),
    ),
    Program(
        family="jax",
        declared_class="training",
        modules=("MaxText.train", "maxtext.train", "axlearn.common.launch_trainer_main", "paxml.main", "t5x.train"),
    ),
    Program(
        family="horovod",
        declared_class="training",
        commands=("horovodrun",),
        modules=("horovod.runner",),
        is_launcher=True,
    ),
    Program(
        family="composer",
        declared_class="training",
        commands=("composer",),
        modules=("composer.cli.launcher",),
        is_launcher=True,
    ),
    Program(
        family="colossalai",
        declared_class="training",
        commands=("colossalai run",),
        is_launcher=True,
    ),
    Program(
        family="finetuning",
        declared_class="training",
        commands=("axolotl train", "llamafactory-cli train", "tune run", "litgpt pretrain", "litgpt finetune"),
        modules=("axolotl.cli.train",),
        is_launcher=True,
    ),
    # Inference.
    Program(
        family="vllm",
        declared_class="inference",
        commands=("vllm",),
        modules=("vllm",),
        titles=("VLLM",),
        is_launcher=True,
    ),
    Program(
        family="sglang",
        declared_class="inference",
        commands=("sglang serve", "sglang_router"),
        modules=("sglang.launch_server", "sglang_router"),
        titles=("sglang",),
        is_launcher=True,
    ),
    Program(
        family="dynamo",
        declared_class="inference",
        modules=("dynamo.vllm", "dynamo.sglang", "dynamo.trtllm"),
        is_launcher=True,
    ),
    Program(family="triton", declared_class="inference", commands=("tritonserver",), is_launcher=True),
    Program(
        family="tensorrt_llm",
        declared_class="inference",
        commands=("trtllm-serve", "trtllm-llmapi-launch"),
        modules=("tensorrt_llm.commands.serve",),
        is_launcher=True,
    ),
    Program(
        family="tgi",
        declared_class="inference",
        commands=(
            "text-generation-launcher",
            "text-generation-server",
            "text-generation-router",
            "text-embeddings-router",
        ),
        is_launcher=True,
    ),
    Program(
        family="torchserve",
        declared_class="inference",
        commands=("torchserve", "model_service_worker.py"),
        java_classes=("org.pytorch.serve.ModelServer",),
        is_launcher=True,
    ),
    Program(family="tensorflow_serving", declared_class="inference", commands=("tensorflow_model_server",)),
    Program(
        family="kserve",
        declared_class="inference",
        modules=("huggingfaceserver", "kserve"),
        is_launcher=True,
    ),
    Program(
        family="bentoml",
        declared_class="inference",
        commands=("bentoml serve",),
        modules=("bentoml.serve",),
        is_launcher=True,
    ),
    Program(
        family="lmdeploy",
        declared_class="inference",
        commands=("lmdeploy serve",),
        modules=("lmdeploy.serve",),
        is_launcher=True,
    ),
    Program(family="ollama", declared_class="inference", commands=("ollama", "ollama_llama_server"), is_launcher=True),
    Program(
        family="llama_cpp",
        declared_class="inference",
        commands=("llama-server", "llama-cli", "llama-box"),
        modules=("llama_cpp.server",),
    ),
    # Used for anything.
    Program(
        family="notebook",
        commands=(
            "jupyter-lab",
            "jupyter-notebook",
            "jupyter-labhub",
            "jupyterhub-singleuser",
            "jupyter lab",
            "jupyter notebook",
            "ipykernel_launcher.py",
            "ipython",
            "ipython3",
            "marimo",
        ),
        modules=("ipykernel_launcher", "ipykernel", "jupyterlab", "notebook", "IPython"),
        is_launcher=True,
    ),
    Program(family="ray", commands=("raylet", "ray"), titles=("ray",), is_launcher=True),
    Program(
        family="mpi",
        commands=("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "orted", "prterun", "prted", "hydra_pmi_proxy"),
        modules=("mpi4py",),
        is_launcher=True,
    ),
    Program(family="pytorch", thread_names=("pt_main_thread",)),
    # Neither training nor inference.
    Program(family="gromacs", declared_class="other", commands=("gmx", "gmx_mpi", "gmx_d", "mdrun")),
    Program(
        family="lammps",
        declared_class="other",
        commands=("lmp", "lmp_mpi", "lmp_gpu", "lmp_kokkos", "lmp_cuda", "lammps"),
    ),
    Program(family="namd", declared_class="other", commands=("namd2", "namd3")),
    Program(family="amber", declared_class="other", commands=("pmemd.cuda", "pmemd.cuda.mpi", "pmemd.cuda_spfp")),
    Program(family="vasp", declared_class="other", commands=("vasp_std", "vasp_gam", "vasp_ncl")),
    Program(family="cp2k", declared_class="other", commands=("cp2k.psmp", "cp2k.popt", "cp2k.ssmp")),
    Program(family="quantum_espresso", declared_class="other", commands=("pw.x", "ph.x", "cp.x")),
    Program(family="relion", declared_class="other", commands=("relion_refine", "relion_refine_mpi")),
    Program(
        family="benchmark",
        declared_class="other",
        commands=(
            "xhpl",
            "xhpcg",
            "gpu_burn",
            "gpu-burn",
            "nvbandwidth",
            "all_reduce_perf",
            "all_gather_perf",
            "reduce_scatter_perf",
            "alltoall_perf",
            "sendrecv_perf",
            *(f"dcgmproftester{major}" for major in (11, 12, 13)),
        ),
    ),
    Program(
        family="graphics",
        declared_class="other",
        commands=(
            "xorg",
            "xwayland",
            "gnome-shell",
            "kwin_x11",
            "kwin_wayland",
            "plasmashell",
            "weston",
            "sway",
            "dcvserver",
            "blender",
            "houdini",
            "maya.bin",
            "unrealeditor",
            "unity",
            "obs",
        ),
    ),
    Program(family="video", declared_class="other", commands=("ffmpeg", "gst-launch-1.0", "handbrakecli")),
    Program(family="hashcat", declared_class="other", commands=("hashcat", "hashcat.bin")),
    Program(
        family="miner",
        declared_class="other",
        commands=(
            "xmrig",
            "xmrig-cuda",
            "t-rex",
            "ethminer",
            "lolminer",
            "nbminer",
            "phoenixminer",
            "teamredminer",
            "bzminer",
            "rigel",
            "onezerominer",
            "ccminer",
            "kawpowminer",
            "nanominer",
            "wildrig-multi",
            "srbminer-multi",
        ),
    ),
)

_COMMANDS: Final = {name: program for program in PROGRAMS for name in program.commands}
_MODULES: Final = {name: program for program in PROGRAMS for name in program.modules}
_TITLES: Final = {name: program for program in PROGRAMS for name in program.titles}
_JAVA_CLASSES: Final = {name: program for program in PROGRAMS for name in program.java_classes}
_THREAD_NAMES: Final = {name: program for program in PROGRAMS for name in program.thread_names}

_PYTHON: Final = re.compile(r"(?:python|pypy)[0-9.]*[dt]?")
#: Options of Python that take a value, attached or as the next argument.
_PYTHON_VALUES: Final = "WX"


def recognise(cmdline: bytes, comm: bytes) -> Program | None:
    """Return the row that a process matches, by the contents of its files cmdline and comm; None for no known one.

    `cmdline` may be cut: its last argument counts only where the NUL that ends it is there, or where it is the only
    one.
    """
    arguments = _arguments(cmdline)
    name = comm.decode("utf-8", "replace").rstrip("\n")
    found = _by_arguments(arguments) if arguments else _COMMANDS.get(name.casefold())
    return found or _THREAD_NAMES.get(name)


def _arguments(cmdline: bytes) -> list[str]:
    *ended, rest = cmdline.decode("utf-8", "replace").split("\0")
    if not ended:
        # A process that wrote a title over its arguments: the first word is the program, the rest is prose.
        return rest.split()[:1]
    while ended and not ended[-1]:
        ended.pop()  # what a title left of the arguments' room
    return ended if len(ended) != 1 else ended[0].split()[:1]


def _by_arguments(arguments: Sequence[str]) -> Program | None:
    title, colons, _ = arguments[0].partition("::")
    if colons:
        return _TITLES.get(title)
    name = _base_name(arguments[0])
    if _PYTHON.fullmatch(name):
        return _by_python(arguments[1:])
    if name == "java":
        return next((_JAVA_CLASSES[word] for word in arguments if word in _JAVA_CLASSES), None)
    return _by_command(name, arguments[1:])


def _by_command(name: str, arguments: Sequence[str]) -> Program | None:
    return _COMMANDS.get(name) or (_COMMANDS.get(f"{name} {arguments[0]}") if arguments else None)


def _by_python(arguments: Sequence[str]) -> Program | None:
    """Match what the interpreter was told to run: the module of -m, or the script."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            return _by_command(_base_name(word), rest)
        if word.startswith("--"):
            if word == "--check-hash-based-pycs" and rest:
                rest.pop(0)
            continue
        for position, letter in enumerate(word[1:], start=2):
            value = word[position:]
            if letter == "m":
                module = value or (rest[0] if rest else "")
                return _by_module(module, rest if value else rest[1:])
            if letter == "c":
                return None
            if letter in _PYTHON_VALUES:
                if not value and rest:
                    rest.pop(0)
                break
    return None


def _by_module(module: str, arguments: Sequence[str]) -> Program | None:
    parent = module
    while parent:
        if parent in _MODULES:
            return _MODULES[parent]
        parent = parent.rpartition(".")[0]
    # `python -m accelerate launch` is `accelerate launch`; a module without a dot may be a command.
    return _by_command(module.casefold(), arguments) if "." not in module else None


def _base_name(path: str) -> str:
    return path.rpartition("/")[2].removeprefix("-").casefold()

"""The table of known programs: what is recognised, and what only looks like it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent.programs import PROGRAMS, recognise
from agent.vocabulary import CLASSES

PRIVACY = Path(__file__).parents[2] / "docs" / "privacy.md"


def words(*arguments, comm="x"):
    """Family and class of a process with these arguments."""
    found = recognise(b"".join(argument.encode() + b"\0" for argument in arguments), comm.encode() + b"\n")
    return (found.family, found.declared_class) if found else None


@pytest.mark.parametrize(
    ("line", "family", "declared"),
    [
        ("torchrun --nproc-per-node=8 train.py", "torchrun", "training"),
        ("/opt/conda/bin/python3.11 /opt/conda/bin/torchrun train.py", "torchrun", "training"),
        ("python -m torch.distributed.run train.py", "torchrun", "training"),
        ("python3 -u -m torch.distributed.launch train.py", "torchrun", "training"),
        ("python3 -um torch.distributed.run train.py", "torchrun", "training"),
        ("python3 -mtorch.distributed.run train.py", "torchrun", "training"),
        ("python3 -W ignore -X dev -m torch.distributed.run train.py", "torchrun", "training"),
        ("python3 -Wignore -Xdev -OO -m torch.distributed.run x", "torchrun", "training"),
        ("python3 --check-hash-based-pycs never -m torch.distributed.run x", "torchrun", "training"),
        ("python3 /usr/local/bin/accelerate launch train.py", "accelerate", "training"),
        ("accelerate launch train.py", "accelerate", "training"),
        ("python -m accelerate.commands.launch train.py", "accelerate", "training"),
        ("python -m accelerate launch train.py", "accelerate", "training"),
        ("deepspeed --num_gpus 8 train.py", "deepspeed", "training"),
        ("python -u -m deepspeed.launcher.launch train.py", "deepspeed", "training"),
        ("python /opt/NeMo/examples/nlp/megatron_gpt_pretraining.py", "nemo", "training"),
        ("python pretrain_gpt.py --tp 8", "megatron", "training"),
        ("python3 -m MaxText.train base.yml", "jax", "training"),
        ("vllm serve /models/x", "vllm", "inference"),
        ("/usr/bin/python3 /usr/local/bin/vllm serve /models/x", "vllm", "inference"),
        ("python3 -m vllm.entrypoints.openai.api_server", "vllm", "inference"),
        ("python3 -m sglang.launch_server --tp 8", "sglang", "inference"),
        ("tritonserver --model-repository=/m", "triton", "inference"),
        ("/opt/tritonserver/bin/tritonserver", "triton", "inference"),
        ("trtllm-serve /models/x", "tensorrt_llm", "inference"),
        ("text-generation-launcher --model-id x", "tgi", "inference"),
        ("python3 /opt/conda/bin/text-generation-server serve x", "tgi", "inference"),
        ("java -Dx=y -cp .:/a/b.jar org.pytorch.serve.ModelServer --start", "torchserve", "inference"),
        ("python /usr/lib/ts/model_service_worker.py --sock x", "torchserve", "inference"),
        ("tensorflow_model_server --port=8500", "tensorflow_serving", "inference"),
        ("python -m huggingfaceserver --model_id=x", "kserve", "inference"),
        ("/usr/local/bin/ollama runner --model x", "ollama", "inference"),
        ("llama-server -m x.gguf", "llama_cpp", "inference"),
        ("python -m ipykernel_launcher -f /run/kernel-1.json", "notebook", None),
        ("/usr/bin/python3 /usr/bin/jupyter-lab", "notebook", None),
        ("mpirun -np 8 ./a.out", "mpi", None),
        ("gmx mdrun -s x", "gromacs", "other"),
        ("lmp -in x", "lammps", "other"),
        ("namd3 x", "namd", "other"),
        ("vasp_std", "vasp", "other"),
        ("/usr/bin/blender scene.blend", "graphics", "other"),
        ("/usr/lib/xorg/Xorg :0", "graphics", "other"),
        ("/home/x/xmrig -o pool", "miner", "other"),
        ("./t-rex -a ethash", "miner", "other"),
        ("./lolMiner --algo X", "miner", "other"),
    ],
)
def test_programs_are_recognised(line, family, declared):
    assert words(*line.split()) == (family, declared)


@pytest.mark.parametrize(
    ("title", "family"),
    [
        ("VLLM::EngineCore", "vllm"),
        ("VLLM::Worker_TP0_DP1", "vllm"),
        ("sglang::scheduler_TP0", "sglang"),
        ("sglang::detokenizer", "sglang"),
        ("ray::IDLE", "ray"),
        ("ray::TrainWorker.run()", "ray"),
        ("ray::evil of /data/vllm", "ray"),
    ],
)
@pytest.mark.parametrize("rest", [b"", b"\0", b"\0" * 60])
def test_titles_are_recognised_whatever_they_leave_of_the_arguments(title, family, rest):
    found = recognise(title.encode() + rest, b"python3\n")
    assert found is not None
    assert found.family == family


@pytest.mark.parametrize(
    "line",
    [
        "python3 train.py",
        "python3 -u train.py --launcher torchrun",
        "grep vllm",
        "vim torchrun",
        "tail -f /var/log/vllm",
        "python3 /data/vllm/train.py",
        "/data/vllm/train",
        "python3 vllm.py",
        "python3 -c vllm",
        "python3 -c import(x) vllm",
        "python3 - vllm",
        "python3 -m vllm_tools.run",
        "python3 -m my.vllm",
        "python3 -W vllm",
        "python3 -m",
        "python3 --version",
        "python3",
        "accelerate config",
        "accelerate",
        "bash -c vllm",
        "sh torchrun",
        "java -jar vllm.jar",
        "my-vllm serve",
        "vllm2 serve",
        "VLLM:EngineCore",
        "NOTVLLM::EngineCore",
        "vllm::x",
        "pythonic -m vllm",
        "xvllm",
    ],
)
def test_what_only_looks_like_a_program_is_none(line):
    assert words(*line.split()) is None


def test_prose_in_one_argument_counts_by_its_first_word_only():
    """A process that titles itself `grep /usr/bin/vllm` has that in one argument; its base name would be vllm."""
    assert words("grep /usr/bin/vllm") is None
    assert words("slurmstepd: [812345.0] vllm") is None
    assert words("/usr/sbin/ollama: serving") is None
    assert words("ollama serve") == ("ollama", "inference")


def test_a_cut_last_argument_does_not_count():
    """4 KiB hold the beginning of the module's name only: torch.distributed.run may be torch.distributed.runner."""
    assert recognise(b"python3\0-m\0torch.distributed.run", b"python3\n") is None
    assert recognise(b"python3\0-m\0torch.distributed.run\0", b"python3\n") is not None


def test_the_name_of_the_main_thread_is_the_weakest_sign():
    assert words("python3", "x.py", comm="pt_main_thread") == ("pytorch", None)
    assert words("torchrun", "x.py", comm="pt_main_thread") == ("torchrun", "training")
    assert words("python3", "x.py", comm="vllm") is None  # comm is not a token of the command line
    assert recognise(b"", b"xmrig\n").family == "miner"  # nothing else is known of a process without arguments
    assert recognise(b"", b"python3\n") is None


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"\0\0\0", b"\xff\xfe\0-m\0\xff\0", b" ", b"   \0", b"-\0", b"::\0", b"/\0"]
)
def test_hostile_bytes_are_no_program(data):
    assert recognise(data, b"\xff\xff\n") is None
    assert recognise(data, b"") is None


def test_no_name_is_in_two_rows_and_all_words_are_plain():
    for kind in ("commands", "modules", "titles", "java_classes", "thread_names"):
        names = [name for program in PROGRAMS for name in getattr(program, kind)]
        assert len(names) == len(set(names)), kind
    families = [program.family for program in PROGRAMS]
    assert len(families) == len(set(families))
    for program in PROGRAMS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", program.family)
        assert program.declared_class in (None, *CLASSES)
        assert all(command == command.casefold() and "/" not in command for command in program.commands)
        # One that every class of work uses declares none; a class of its own is what the others are for.
        assert program.declared_class != "idle"


def test_the_privacy_page_names_every_family():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", PRIVACY.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows == {program.family: program.declared_class or "none" for program in PROGRAMS}

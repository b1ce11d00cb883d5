"""`paged doctor`: what it finds here, and what it says where something is missing, broken or slow."""

import json
import re
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from rich.cells import cell_len

from paged.attention.native import build
from paged.model import checkpoint
from paged.model.doctor import backends, examine, machine as machines
from paged.model.doctor.machine import machine, unfit_versions
from paged.model.threads import FreeCores


@pytest.fixture(scope="module")
def found():
    """What an examination finds here."""
    return examine()


def test_here_everything_works(found):
    assert found.is_usable, found.problems
    assert found.engine is not None
    assert found.engine.native.compiler is not None
    assert [each.state in ("found", "compiled") for each in found.engine.native.libraries] == [True, True]
    assert found.engine.native.instructions.removesuffix(", AMX") in ("AVX-512", "AVX2", "SSE", "NEON")
    assert 1 <= found.engine.threads <= found.engine.torch_threads
    assert 1 <= found.machine.free_cores <= found.machine.cores
    assert found.libraries[""]["numpy"] is not None


def test_every_backend_that_works_gives_the_same_answer(found):
    on_cpu = [each for each in found.engine.backends if each.device == "cpu"]
    assert [each.name for each in on_cpu] == ["reference", "native", "torch_gather", "triton", "xformers_splitk"]
    assert [each.name for each in on_cpu if each.is_chosen] == ["native"]
    answered = [each for each in found.engine.answers if each.device == "cpu"]
    assert {"reference", "native", "torch_gather"} <= {each.backend for each in answered}
    assert all(each.agrees and each.tokens == 16 for each in answered)
    for each in on_cpu[-2:]:
        assert (each.works, each.reason) == (
            False, "cannot do device cpu; it takes CUDA devices, and a CPU with Triton's interpreter (TRITON_INTERPRET=1)"
        )  # fmt: skip


def test_the_command_prints_a_figure_a_line_and_a_verdict_and_no_table_wider_than_a_terminal(printed, terminal):
    head, *lines, verdict = printed("doctor").splitlines()
    assert head.split() == ["what", "found"]
    names = {line.partition("  ")[0] for line in lines}
    assert names >= {"paged", "extra engine", "processor", "native code uses", "cores", "memory", "a large copy"}
    assert names >= {"C compiler", "native code"}
    assert any(line.startswith("native ") and "yes, the default" in line for line in lines)
    assert verdict == "Everything that should work here works."
    screen = terminal(80, modules=("doctor", "show"), highlight=False)
    printed("doctor", "--no-build")
    drawn = screen.getvalue()
    for words in ("this machine and installation", "attention backends", "torch_gather", "memory"):
        assert words in drawn
    # Without what moves the cursor or colours; of a line that was drawn over again, the last.
    plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).split("\r")[-1] for line in drawn.splitlines()]
    assert max(map(cell_len, plain)) <= 80


def out_of_order(*_arguments):
    raise ValueError("no\nsuch thing")


def zeros(self, queries, pool, layer, plan, options):
    return torch.zeros_like(queries)


@pytest.mark.parametrize(
    ("name", "fault", "answers", "what"),
    [
        (
            "torch_gather.Backend.attend", zeros, {"reference": True, "native": True, "torch_gather": False},
            'The model that ships answers otherwise by the backend "torch_gather" on cpu than by "reference".',
        ),
        (
            "reference.Backend.attend", out_of_order, {"native": True, "torch_gather": True},
            'The model that ships does not answer by the backend "reference" on cpu: .*ValueError: no such thing.',
        ),
        (
            "native.backend.Backend.check", out_of_order, {"reference": True, "torch_gather": True},
            'The backend "native" fails on cpu: ValueError: no such thing.',
        ),
    ],
)  # fmt: skip
def test_a_backend_that_answers_otherwise_or_not_at_all_is_a_problem(monkeypatch, name, fault, answers, what):
    monkeypatch.setattr(f"paged.attention.{name}", fault)
    found = examine()
    (broken,) = (each for each in found.problems if each.is_broken)
    assert re.fullmatch(what, broken.what)
    assert {each.backend: each.agrees for each in found.engine.answers} == answers


def test_a_model_that_does_not_load_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "checkpoint_path", lambda: tmp_path / "gone")
    found = examine()
    (broken,) = (each for each in found.problems if each.is_broken)
    assert broken.what.startswith(f"The model that ships cannot be loaded: CheckpointNotFound: {tmp_path / 'gone'}")
    assert (found.engine.load_s, found.engine.answers) == (None, [])


def test_without_a_compiler_it_says_what_to_do_and_answers_in_torch(paged, nothing_built, monkeypatch):
    monkeypatch.setenv("CC", "/nonexistent")
    status, out, err = paged("doctor", "--json")
    document = json.loads(out)
    assert (status, err, document["is_usable"]) == (1, "", False)
    (broken,) = (each for each in document["problems"] if each["is_broken"])
    assert broken == {
        "what": "CC names '/nonexistent', and there is no such compiler.",
        "remedy": "Install gcc or clang, or name a compiler by CC. Until it can be compiled models run in torch, several times slower.",
        "is_broken": True,
    }
    works = {each["name"]: (each["works"], each["reason"]) for each in document["engine"]["backends"]}
    assert works["native"] == (False, "it cannot be compiled here")
    assert works["torch_gather"] == (True, "")
    assert [each["backend"] for each in document["engine"]["answers"]] == ["reference", "torch_gather"]
    assert all(each["agrees"] for each in document["engine"]["answers"])


def test_what_is_not_built_is_built_unless_that_is_declined(document, nothing_built, monkeypatch):
    # Compiled in half the time, without what makes it fast.
    monkeypatch.setenv("PAGED_CFLAGS", "-O0")

    def native(*options):
        engine = document("doctor", *options)["engine"]
        return [each["state"] for each in engine["native"]["libraries"]], len(engine["answers"])

    assert native("--no-build") == (["not built"] * 2, 0)
    assert not nothing_built.exists()
    assert native() == (["compiled"] * 2, 3)
    assert native("--no-build") == (["found"] * 2, 3)


GONE = ("torch", "transformers", "tokenizers", "safetensors", "tqdm", "xformers", "triton")
WITHOUT_RECORDS = f"""
import importlib.metadata as records
version = records.version
def gone(name):
    if name in {GONE}: raise records.PackageNotFoundError(name)
    return version(name)
records.version = gone
sys.argv = ["paged", "doctor"]
from paged.cli import main
main()
"""


def test_without_torch_it_says_what_brings_it(run_without):
    done = run_without(GONE, WITHOUT_RECORDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert "not installed: torch, transformers, tokenizers, safetensors, tqdm" in done.stdout
    assert "hint: No model runs here: torch, transformers, tokenizers, safetensors, tqdm are not" in done.stdout
    assert "`pip install '.[engine]'` in a checkout of paged" in done.stdout
    assert "attention backends" not in done.stdout


def test_a_torch_that_cannot_be_loaded_is_a_problem(run_python):
    program = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['paged', 'doctor']\nfrom paged.cli import main; main()"
    )
    done = run_python("-c", program)
    assert (done.returncode, done.stderr) == (1, "")
    assert "problem: What a model needs is installed, and cannot be loaded: ModuleNotFoundError: " in done.stdout
    assert done.stdout.endswith("\n1 problem.\n")


@pytest.mark.parametrize(
    ("instructions", "vectors"),
    [(("sse2", "avx", "avx2", "avx512f"), "AVX-512"), (("sse2", "avx2"), "AVX2"), (("asimd",), "NEON"), ((), "")],
)
def test_the_widest_vectors_are_named(monkeypatch, instructions, vectors):
    monkeypatch.setattr(build, "processor", lambda: " ".join(instructions))
    assert machine(FreeCores(lambda: None, cores=3)).instructions == vectors


def test_a_library_that_is_too_old_is_named_with_the_versions_that_fit(monkeypatch):
    wanted = ["torch>=2.10; extra == 'engine'", "ruff>=9; extra == 'dev'"]
    monkeypatch.setattr(machines, "requires", lambda name: wanted)
    monkeypatch.setattr(machines, "version", lambda name: "2.4.1")
    (problem,) = unfit_versions()
    assert problem.what == "torch 2.4.1 is installed, and paged was made for torch>=2.10."
    assert problem.is_broken is False
    monkeypatch.setattr(machines, "version", lambda name: "2.10.0+cpu")
    assert list(unfit_versions()) == []
    # Without a record of its own no version is judged.
    monkeypatch.setattr(machines, "requires", lambda name: metadata.requires("not installed"))
    monkeypatch.setattr(machines, "version", lambda name: "2.4.1")
    assert list(unfit_versions()) == []


@pytest.mark.parametrize(
    ("is_there", "built_for", "devices", "words", "is_broken"),
    [
        (True, "13.0", 2, None, None), (False, "13.0", 0, None, None),
        (True, None, 0, "is built without CUDA", False), (True, "13.0", 0, "finds no device", True),
    ],
)  # fmt: skip
def test_devices_are_listed_and_a_driver_whose_device_torch_cannot_use_is_told(
    monkeypatch, tmp_path, is_there, built_for, devices, words, is_broken
):
    monkeypatch.setattr(backends, "_DRIVER", tmp_path if is_there else tmp_path / "none")
    monkeypatch.setattr(backends, "which", lambda name: None)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    about = SimpleNamespace(name="H200", total_memory=141 * 10**9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: about)
    found, problems = backends.cuda_devices()
    assert [(each.name, each.total_bytes, each.capability) for each in found] == [
        ("H200", 141 * 10**9, "9.0")
    ] * devices
    assert [each.is_broken for each in problems] == ([] if words is None else [is_broken])
    assert all(words in each.what for each in problems)


def test_what_the_command_line_sets_for_itself_is_told_apart(monkeypatch):
    from paged.cli import SET_FOR_ITSELF, doctor

    monkeypatch.setitem(SET_FOR_ITSELF, "GOMP_SPINCOUNT", "2000")
    assert doctor._waiting({}) == "as OpenMP has it"
    assert doctor._waiting({"GOMP_SPINCOUNT": "2000"}).startswith("GOMP_SPINCOUNT=2000, set by this command line")
    assert doctor._waiting({"OMP_WAIT_POLICY": "PASSIVE", "CC": "clang"}) == "OMP_WAIT_POLICY=PASSIVE"

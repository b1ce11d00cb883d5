"""The library of the backend `native`: made once, kept, made again where it is damaged; and what is said where it cannot be made."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from paged.attention import LayerShape, backend as registry, best_backend, get_backend
from paged.attention.native import backend as native, build
from paged.errors import BuildFailed, UnsupportedByBackend

# They are replaced, or remember what they said, in some of the tests.
REMEMBER = (build.library, build.processor, native.attention_function, registry._say_once)


def forget():
    for each in REMEMBER:
        each.cache_clear()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The folder for libraries: it is not there yet, and nothing is loaded."""
    folder = tmp_path / "a" / "cache"
    monkeypatch.setenv("PAGED_CACHE", str(folder))
    for name in ("CC", "PAGED_CFLAGS"):
        monkeypatch.delenv(name, raising=False)
    forget()
    yield folder
    forget()


@pytest.fixture
def source(tmp_path):
    """A file in C that is compiled in no time."""
    file = tmp_path / "tiny.c"
    file.write_text("#ifndef ANSWER\n#define ANSWER 42\n#endif\nint answer(void) { return ANSWER; }\n")
    return file


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """compiler(*lines): $CC is a script of these lines."""

    def use(*lines):
        script = tmp_path / "compiler"
        script.write_text("\n".join(["#!/bin/sh", *lines]))
        script.chmod(0o755)
        monkeypatch.setenv("CC", str(script))

    return use


def answer_of(source):
    """What the library says, loaded as by a new process."""
    build.library.cache_clear()
    return build.library("tiny", (source,)).answer()


def shape_with(**changes):
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}
    return LayerShape(**{**shape, "dtype": torch.float32, "device": torch.device("cpu"), **changes})


def test_a_library_is_made_once(cache, source, compiler):
    calls = source.with_name("calls")
    compiler(f'echo "$1" >> {calls}', 'exec cc "$@"')
    assert [answer_of(source), answer_of(source)] == [42, 42]
    # Compiled and linked; and whoever comes later asks for the version alone.
    assert (len(calls.read_text().split()), len(list(cache.iterdir()))) == (4, 1)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PATH", "", r"there is no C compiler \(cc, gcc or clang\)."),
        ("CC", "no-such-compiler -g", "CC names 'no-such-compiler', and there is no such compiler."),
        ("CC", "cc '-g", 'CC is "cc \'-g": no closing quotation.'),
        ("PAGED_CFLAGS", "-g 'x", 'PAGED_CFLAGS is "-g \'x": no closing quotation.'),
        ("PAGED_CACHE", __file__, f"{__file__}: File exists; name another folder by PAGED_CACHE."),
    ],
)
def test_without_a_compiler_or_a_folder_the_backend_says_so(cache, monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedByBackend, match=f'^backend "native" cannot do anything here; {words}$') as raised:
        get_backend("native")
    assert isinstance(raised.value.__cause__, BuildFailed)


@pytest.mark.parametrize("invariant", [False, True])
def test_without_a_compiler_torch_is_chosen_and_that_is_said_once(cache, monkeypatch, invariant):
    monkeypatch.setenv("PATH", "")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        chosen = [best_backend([shape_with()], invariant=invariant) for _ in range(3)]
    assert {(each.name, each.is_invariant) for each in chosen} == {("torch_gather", invariant)}
    (one,) = said
    assert 'because "native" cannot be compiled: there is no C compiler (cc, gcc or clang).' in str(one.message)


COMPLAINS = 'test "$1" = --version && exit 0; echo no room >&2; echo for it >&2; exit 1'


@pytest.mark.parametrize(
    ("lines", "patience", "message"),
    [
        (COMPLAINS, 120, "failed: no room for it"),
        ("exit 3", 120, "failed: exit status 3"),
        ("exec sleep 60", 0.1, "did not run: .* timed out after 0.1 seconds"),
    ],
    ids=["complains", "fails without a word", "hangs"],
)
def test_what_the_compiler_complains_of_is_said(cache, source, compiler, monkeypatch, lines, patience, message):
    monkeypatch.setattr(build, "_PATIENCE", patience)
    compiler(lines)
    with pytest.raises(BuildFailed, match=f"/compiler {message}$"):
        answer_of(source)
    with pytest.raises(UnsupportedByBackend, match=f"/compiler {message}$"):
        get_backend("native")
    assert list(cache.glob("*")) == []


def test_a_user_without_a_home_is_told_what_would_do(cache, source, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("PAGED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(BuildFailed, match="^Could not determine home directory. Name a folder by PAGED_CACHE.$"):
        answer_of(source)


HARMS = {
    "text": lambda whole: b"no library at all",
    "cut by a byte": lambda whole: whole[:-1],
    "zeros within": lambda whole: whole[:5000] + bytes(100) + whole[5100:],
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_library_that_is_damaged_is_made_again(cache, source, harm):
    assert answer_of(source) == 42
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    # Not in its place: this process has it loaded.
    kept.unlink()
    kept.write_bytes(harm(whole))
    assert answer_of(source) == 42
    assert [(file, file.read_bytes()) for file in cache.iterdir()] == [(kept, whole)]
    assert build.is_kept("tiny", (source,))
    # One that cannot be read is none.
    kept.unlink()
    kept.mkdir()
    assert not build.is_kept("tiny", (source,))


@pytest.mark.parametrize("changed", ["processor", "flags", "source", "compiler"])
def test_what_a_library_came_from_is_in_its_name(cache, source, compiler, monkeypatch, changed):
    answer_of(source)
    if changed == "processor":
        monkeypatch.setattr(build, "processor", lambda: "another")
    elif changed == "flags":
        monkeypatch.setenv("PAGED_CFLAGS", "-g -DTHIS='1 + 1'")
    elif changed == "source":
        source.write_text(f"{source.read_text()}/* */\n")
    else:
        compiler('test "$1" = --version && echo 1.0 && exit 0', 'exec cc "$@"')
    answer_of(source)
    first, second = cache.iterdir()
    assert first.name.split("-")[1] != second.name.split("-")[1]


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [("CC", "cc -DANSWER=6", 6), ("PAGED_CFLAGS", "-DANSWER=7 -UNOTHING", 7), ("PAGED_CACHE", ".", 42)],
    ids=["a compiler with arguments", "flags come last", "a folder named from where the process is"],
)
def test_the_environment_names_compiler_flags_and_folder(cache, source, monkeypatch, name, value, answer):
    monkeypatch.chdir(source.parent)
    monkeypatch.setenv(name, value)
    assert answer_of(source) == answer


def test_without_threads_to_share_nothing_is_built(cache, source, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "")
    with pytest.raises(BuildFailed, match="no OpenMP library"):
        build.library("tiny", (source,))


def test_two_processes_that_make_it_at_once_both_have_it(cache, source, compiler, repository):
    # Each takes longer than the other takes to begin.
    compiler('test "$1" = --version || sleep 0.5', 'exec cc "$@"')
    program = (
        "import ctypes, runpy, sys; from pathlib import Path\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "print(runpy.run_path(sys.argv[2])['library']('tiny', (Path(sys.argv[3]),)).answer())"
    )
    # The module by itself, and what it shares with torch, which takes two seconds to import.
    command = [sys.executable, "-c", program, build._openmp(), build.__file__, str(source)]
    env = {**os.environ, "PYTHONPATH": str(repository)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, env=env, **pipes) for _ in range(2)]
    assert [each.communicate(timeout=600) for each in both] == [("42\n", "")] * 2
    assert (len(list(cache.iterdir())), answer_of(source)) == (1, 42)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 257}, "heads of 257; it does heads of up to 256; "),
        ({"dtype": torch.float16}, "torch.float16; it reads float32 and bfloat16; "),
        ({"dtype": torch.float64}, "torch.float64; it reads float32 and bfloat16; "),
        ({"device": torch.device("cuda")}, "device 'cuda'; it runs on a CPU; "),
    ],
)
def test_a_shape_that_it_cannot_do_is_refused_by_name(changes, message):
    backend, others = get_backend("native"), 'the backends "torch_gather" and "reference" can.'
    backend.check(shape_with(head_dim=256, dtype=torch.bfloat16, has_soft_cap=True, has_sinks=True))
    with pytest.raises(UnsupportedByBackend, match=f'^backend "native" cannot do {message}{others}$'):
        backend.check(shape_with(**changes))
    # On a CPU it is chosen by itself where it can do the layers.
    assert best_backend([shape_with()]).name == "native"
    assert changes.get("device") or best_backend([shape_with(**changes)], invariant=True).name == "torch_gather"

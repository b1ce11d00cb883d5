"""A user's own `scheduler.py` beside ours: one sentence that names it, and no other program run by mistake."""

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

RunPython = Callable[..., "CompletedProcess[str]"]

CATCH = (
    "import paged\n"
    "try:\n"
    "    paged.Scheduler\n"
    "except paged.ShadowedPackage as error:\n"
    "    print(error.name, error.path, error, sep='\\n')\n"
)


def shadow(folder: Path, name: str) -> Path:
    """A module that would give itself away by its side effect if it were run."""
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("print('somebody else was imported')\n")
    return file


@pytest.mark.parametrize("name", ["scheduler", "block_manager", "attention"])
def test_a_module_in_the_way_is_named_and_not_run(run_python: RunPython, tmp_path: Path, name: str) -> None:
    file = shadow(tmp_path, f"{name}.py")
    result = run_python("-c", CATCH)
    found, path, sentence = result.stdout.splitlines()
    assert (found, path) == (name, str(file))
    assert sentence.startswith(f"{file} shadows the package `{name}` that belongs to paged (")
    assert "rename it" in sentence
    assert sentence.count(". ") == 0


def test_a_package_in_the_way_is_named_by_its_first_file(run_python: RunPython, tmp_path: Path) -> None:
    file = shadow(tmp_path, "scheduler/__init__.py")
    assert run_python("-c", CATCH).stdout.splitlines()[1] == str(file)


def test_a_module_that_is_imported_already_is_found_too(run_python: RunPython, tmp_path: Path) -> None:
    file = shadow(tmp_path, "scheduler.py")
    result = run_python("-c", f"import scheduler, sys\nsys.path.remove('')\n{CATCH}")
    assert result.stdout.splitlines()[:3] == ["somebody else was imported", "scheduler", str(file)]


def test_a_module_without_a_file_is_reported(run_python: RunPython) -> None:
    result = run_python("-c", f"import sys, types\nsys.modules['scheduler'] = types.ModuleType('scheduler')\n{CATCH}")
    name, path, sentence = result.stdout.splitlines()
    assert (name, path) == ("scheduler", "None")
    assert "sys.modules" in sentence


def test_a_folder_without_init_hides_nothing(run_python: RunPython, tmp_path: Path) -> None:
    (tmp_path / "scheduler").mkdir()
    result = run_python("-c", f"{CATCH}print('found ours')")
    assert result.stdout == "found ours\n", result.stderr


def test_another_package_in_the_very_place_of_ours_is_told_by_its_names(
    run_python: RunPython, tmp_path: Path, repository: Path
) -> None:
    # As if `pip install` of somebody's `scheduler` had written over ours in site-packages.
    for package in ("paged", "block_manager", "attention"):
        shutil.copytree(repository / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "scheduler").mkdir()
    file = tmp_path / "scheduler" / "__init__.py"
    file.write_text("class Scheduler: ...\n")
    name, path, sentence = run_python("-c", CATCH).stdout.splitlines()
    assert (name, path) == ("scheduler", str(file))
    assert "is not the package `scheduler` that belongs to paged, for it lacks Batch, BatchEnded, " in sentence


def test_the_error_is_an_import_error_with_one_sentence_at_the_end_of_the_traceback(
    run_python: RunPython, tmp_path: Path
) -> None:
    file = shadow(tmp_path, "scheduler.py")
    result = run_python("-c", "from paged import Scheduler")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"paged.siblings.ShadowedPackage: {file} shadows the package")
    program = "try:\n    from paged import Scheduler\nexcept ImportError as error:\n    print(type(error).__name__)"
    assert run_python("-c", program).stdout == "ShadowedPackage\n"


@pytest.mark.parametrize("how", ["python -m paged", "the console script"])
def test_the_command_line_says_one_line_and_exits_with_2(run_python: RunPython, tmp_path: Path, how: str) -> None:
    file = shadow(tmp_path, "scheduler.py")
    script = Path(sysconfig.get_path("scripts")) / "paged"
    start = ("-m", "paged") if how == "python -m paged" else (str(script),)
    result = run_python(*start, "demo", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert str(file) in result.stderr

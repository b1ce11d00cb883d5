"""What importing costs, offers and leaves out; and that an error is the same in another process, and as a copy."""

import ast
import copy
import importlib
import inspect
import pickle
import re
import sys
from pathlib import Path

import pytest

import paged

# What the memory layer, the scheduler and the test kit must do without.
HEAVY = ("torch", "transformers", "hypothesis", "matplotlib", "plotly", "typer", "rich")


def loaded_after(run_python, program):
    result = run_python("-c", f"{program}\nimport sys; print(*sys.modules, sep='\\n')")
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


# Those that run a model, and so need the `engine` extra.
ENGINE_NAMES = ("LLM", "AsyncEngine", "Engine", "LoadedModel", "load_model")
PACKAGES = ("scheduler", "block_manager", "attention", "sampling", "study.report")
REST = f"import paged\nfor name in set(paged.__all__) - {set(ENGINE_NAMES)}: getattr(paged, name)"
KIT = "import paged.testing\nfor name in set(paged.testing.__all__) - {'machines', 'strategies'}: getattr(paged.testing, name)"


def test_importing_a_package_or_any_other_public_name_leaves_the_heavy_ones_out(run_python):
    loaded = loaded_after(run_python, "\n".join([*(f"import paged.{name}" for name in PACKAGES), REST, KIT]))
    assert {f"paged.{name}" for name in (*PACKAGES, "testing.engine_rig")} <= loaded
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize("program", ["import paged; assert paged.__version__", "import paged.testing.pytest_plugin"])
def test_paged_alone_and_its_pytest_plugin_load_nothing_of_the_memory_layer(run_python, program):
    loaded = loaded_after(run_python, program)
    assert loaded.isdisjoint({"paged.block_manager", "paged.scheduler", "paged.attention", "numpy", "msgspec"})
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize("start", [["-c", "from paged import Scheduler, attention"], ["-m", "paged", "policies"]])
def test_modules_of_the_same_names_beside_a_program_are_left_alone(run_python, tmp_path, start):
    for room in ("attention", "block_manager", "scheduler"):
        (tmp_path / f"{room}.py").write_text("raise SystemExit('the module beside the program was imported')\n")
    result = run_python(*start)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_room_has_one_name(run_python, repository):
    # In the checkout the three folders lie beside paged; what is loaded, pickled and type-checked is paged's part.
    program = f"import sys; sys.path.insert(0, {str(repository)!r}); import paged.attention; paged.Scheduler"
    loaded = loaded_after(run_python, program)
    assert {"paged.attention", "paged.block_manager.manager", "paged.scheduler.core"} <= loaded
    assert {name.partition(".")[0] for name in loaded}.isdisjoint({"attention", "block_manager", "scheduler"})


def test_a_name_that_needs_a_library_which_is_not_there_says_what_installs_it(run_without):
    program = (
        "import paged\n"
        f"for name in {ENGINE_NAMES}:\n"
        "    try: getattr(paged, name)\n"
        "    except paged.errors.MissingExtra as error: print(error)\n"
    )
    said = run_without(("torch", "transformers"), program).stdout.splitlines()
    brings = "needs torch, which is not installed; `pip install '.[engine]'` in a checkout of paged brings it."
    assert said == [f"paged.{name} {brings}" for name in ENGINE_NAMES]


def test_a_star_imports_what_is_installed_and_where_that_is_the_core_nothing_of_the_engine(run_python):
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'safetensors', 'tokenizers', 'tqdm')))\n"
        "from paged import *\n"
        "import paged\n"
        f"print(Scheduler.__name__, SamplingParams.__name__, [name for name in {ENGINE_NAMES} if name in dir()])\n"
    )
    result = run_python("-c", program)
    assert (result.stdout, result.stderr) == ("Scheduler SamplingParams []\n", "")


def test_type_checkers_see_the_same_names_from_the_same_packages():
    tree = ast.parse(Path(paged.__file__).read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If) and isinstance(node.body[0], ast.ImportFrom))
    seen = {
        node.module: tuple(sorted(alias.name for alias in node.names))
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
    }
    assert seen == {package: tuple(sorted(names)) for package, names in paged._PUBLIC_NAMES.items()}
    lazy = {name for names in paged._PUBLIC_NAMES.values() for name in names}
    assert lazy | {"PagedError"} == set(paged.__all__)


def test_every_public_name_is_there_and_sorted_and_an_unknown_one_is_an_attribute_error():
    # Constants first, then classes, then functions: the order that ruff keeps.
    assert paged.__all__ == sorted(set(paged.__all__), key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert [name for name in paged.__all__ if getattr(paged, name, None) is None] == []
    assert set(paged.__all__) <= set(dir(paged))
    with pytest.raises(AttributeError, match="module 'paged' has no attribute 'Schedular'"):
        paged.Schedular  # noqa: B018


@pytest.mark.parametrize("name", ["OutOfBlocks", "MissingExtra", "PagedWarning"])
def test_an_error_is_a_name_of_paged_errors_alone_and_who_asks_paged_for_it_is_told(name):
    assert getattr(paged.errors, name).__module__ == "paged.errors"
    with pytest.raises(AttributeError, match=f"module 'paged' has no attribute '{name}'; it is paged.errors.{name}"):
        getattr(paged, name)


@pytest.mark.parametrize("room", ["attention", "block_manager", "scheduler"])
def test_no_room_has_errors_of_its_own(room):
    module = importlib.import_module(f"paged.{room}")
    assert {name for name in vars(paged.errors) if name[0].isupper()}.isdisjoint(module.__all__)


def test_acceptance_tests_import_only_paged(repository):
    allowed = {"paged", "numpy", "pytest", "hypothesis", *sys.stdlib_module_names}
    sources = [path.read_text() for path in (repository / "tests" / "acceptance").glob("*.py")]
    found = {name for text in sources for name in re.findall(r"^ *(?:from|import) (\w+)", text, flags=re.MULTILINE)}
    assert len(sources) > 40 and found <= allowed


PUBLIC_ERRORS = [
    each
    for name, each in vars(paged.errors).items()
    if isinstance(each, type) and issubclass(each, BaseException) and not name.startswith("_")
]
ARGUMENTS = {
    "int": 1_000, "int | None": 7, "float": 0.5, "float | None": 0.5, "str": "a", "str | None": "b",
    "str | int | None": "c", "object": "d", "Path": Path("e"), "Iterable[str]": ["f", "g"], "Iterable[int]": [2, 4],
}  # fmt: skip
"""By what a class's own `__init__` says that it takes."""


def instance_of(kind):
    """One error of this class, with numbers in its text where it makes that itself."""
    if all("__init__" not in vars(each) for each in kind.__mro__ if each.__module__ == "paged.errors"):
        return kind("a")
    wanted = [each for name, each in inspect.signature(kind).parameters.items() if name != "self"]
    given = {each.name: ARGUMENTS[each.annotation] for each in wanted}
    named = {each.name: given.pop(each.name) for each in wanted if each.kind is each.KEYWORD_ONLY}
    return kind(*given.values(), **named)


@pytest.mark.parametrize("taken", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", PUBLIC_ERRORS, ids=lambda kind: kind.__name__)
def test_every_public_error_has_the_same_text_and_attributes_as_a_copy_and_out_of_a_pickle(kind, taken):
    error = instance_of(kind)
    error.add_note("while a request was added")
    other = taken(error)
    assert type(other) is kind and isinstance(error, paged.PagedError | ImportError | Warning)
    assert (str(other), repr(other), other.args) == (str(error), repr(error), error.args)
    assert vars(other) == vars(error)
    for name in ("name", "path"):
        assert getattr(other, name, None) == getattr(error, name, None)

"""The names: which backends there are, what each import loads, and that whatever is announced exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from paged import attention, errors


def loaded_after(run_python, program):
    result = run_python("-c", f"{program}\nimport sys; print(*sys.modules, sep='\\n')")
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_reading_the_list_of_names_loads_no_torch(run_python):
    loaded = loaded_after(run_python, "from paged import attention; attention.__all__; dir(attention)")
    assert "paged.attention" in loaded
    assert loaded.isdisjoint({"torch", "paged.attention.backend", "paged.attention.kv_pool"})


def test_asking_for_a_backend_loads_no_other(run_python):
    pytest.importorskip("torch")
    loaded = loaded_after(run_python, "from paged import attention; attention.get_backend('reference')")
    backends = {f"paged.attention.{name}" for name in attention.known_backends()}
    assert loaded & backends == {"paged.attention.reference"}


def test_every_announced_name_exists():
    pytest.importorskip("torch")
    assert [name for name in attention.__all__ if getattr(attention, name, None) is None] == []
    assert set(attention.__all__) <= set(dir(attention))


def test_names_are_announced_once_and_loaded_from_where_type_checkers_see_them():
    tree = ast.parse(Path(attention.__file__).read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If) and isinstance(node.body[0], ast.ImportFrom))
    seen = {alias.name: f"paged.attention.{node.module}" for node in guard.body for alias in node.names}
    assert seen == attention._HOMES
    assert sorted(seen) == sorted(attention.__all__)


def test_a_name_that_nobody_announced_is_an_attribute_error():
    with pytest.raises(AttributeError, match="^module 'paged.attention' has no attribute 'KVPoll'$"):
        attention.KVPoll  # noqa: B018


def test_an_unknown_backend_is_told_the_known_ones():
    pytest.importorskip("torch")
    message = "^unknown attention backend 'flash'; known ones are reference, native, torch_gather, xformers_splitk.$"
    with pytest.raises(errors.UnknownBackend, match=message):
        attention.get_backend("flash")


@pytest.mark.parametrize("name", ["reference", "native", "torch_gather"])
def test_a_backend_bears_the_name_it_is_asked_by(name):
    pytest.importorskip("torch")
    assert attention.get_backend(name).name == name
    assert attention.get_backend(name) is not attention.get_backend(name)


def test_every_error_is_an_attention_error():
    for each in (errors.BuildFailed, errors.InvalidPool, errors.UnknownBackend, errors.UnsupportedByBackend):
        assert issubclass(each, errors.AttentionError)

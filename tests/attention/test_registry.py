"""The names: which backends there are, what each import loads, and that whatever is announced exists."""

import ast
import sys
from pathlib import Path

import pytest

from paged import attention


def test_asking_for_a_backend_loads_no_other(monkeypatch):
    monkeypatch.delitem(sys.modules, "paged.attention.reference", raising=False)
    for each in ("native.backend", "torch_gather", "xformers_splitk"):
        monkeypatch.setitem(sys.modules, f"paged.attention.{each}", None)
    assert attention.get_backend("reference").name == "reference"
    with pytest.raises(ImportError):
        attention.get_backend("native")


def test_every_announced_name_exists_and_type_checkers_see_it_where_it_is_loaded_from():
    tree = ast.parse(Path(attention.__file__).read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If) and isinstance(node.body[0], ast.ImportFrom))
    seen = {alias.name: f"paged.attention.{node.module}" for node in guard.body for alias in node.names}
    assert (seen, sorted(seen)) == (attention._HOMES, sorted(attention.__all__))
    assert [name for name in seen if getattr(attention, name, None) is None] == []
    assert set(seen) <= set(dir(attention))
    with pytest.raises(AttributeError, match="^module 'paged.attention' has no attribute 'KVPoll'$"):
        attention.KVPoll  # noqa: B018

"""tools/docs_lists.py: lists of docstrings become tables, and all else stays."""

import sys
from types import SimpleNamespace

import pytest

TEXT = """A struct.

n            answers
best_of      so many are made,
             and the n likeliest stay
temperature1 a name that fills its column
long_names, two_of_them
             their text
either|or    a bar

    a picture    stays
The end."""


@pytest.fixture
def with_tables(monkeypatch, repository):
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))
    monkeypatch.syspath_prepend(repository / "tools")
    import docs_lists

    return docs_lists.with_tables


def test_a_list_becomes_a_table_with_what_is_indented_below_an_item_in_it(with_tables):
    rows = [line for line in with_tables(TEXT).splitlines() if line.startswith("| `")]
    assert rows == [
        "| `n` | answers |",
        "| `best_of` | so many are made, and the n likeliest stay |",
        "| `temperature1` | a name that fills its column |",
        "| `long_names, two_of_them` | their text |",
        "| `either\\|or` | a bar |",
    ]


def test_text_without_a_list_stays(with_tables):
    text = "A noun.\n\n    a picture    of something\n\nReturns x."
    assert with_tables(text) == text
    assert with_tables(TEXT).startswith("A struct.\n") and with_tables(TEXT).endswith(
        "    a picture    stays\nThe end."
    )

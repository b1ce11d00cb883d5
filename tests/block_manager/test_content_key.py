"""Keys by which content is found: two contents never share one."""

import pytest
from hypothesis import example, given, settings, strategies as st

from paged.block_manager.content_key import namespace_of, node_prefix, root_prefix
from paged.errors import InvalidNamespace

# Few letters and small numbers, so that what could be mistaken for something else comes up often.
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-300, 300)
    | st.integers()
    | st.text("1N\x00\ud800", max_size=3)
    | st.binary(max_size=3)
)
NAMESPACES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
BLOCKS = st.binary(min_size=8, max_size=8)


@settings(max_examples=100, derandomize=True)
@given(NAMESPACES, NAMESPACES)
@example((1, 2), ((1, 2),))
@example(("ab", "c"), ("a", "bc"))
@example(("s", ""), ("", "s"))
@example(("a", "b"), ("asb",))
@example((("a",), "b"), (("a", "b"),))
@example((1, None), (1 + 256 * ord("N"),))
@example((), None)
@example(((), ()), ((),))
@example("N", None)
@example(127, 128)
@example(-1, 255)
def test_two_namespaces_share_an_encoding_only_if_they_are_one(one, other):
    # repr tells types and values apart, which == does not: True == 1.
    assert (root_prefix(one) == root_prefix(other)) == (repr(one) == repr(other))


NODES = st.tuples(st.integers(0, 300) | st.integers(0, 2**62), st.integers(0, 300) | st.integers(0, 2**31))
CONTENT = st.tuples(st.builds(root_prefix, NAMESPACES) | NODES, BLOCKS)


@settings(max_examples=200, derandomize=True)
@given(CONTENT, CONTENT)
def test_a_key_is_one_namespace_or_one_node_and_one_block(one, other):
    keys = [(parent if isinstance(parent, bytes) else node_prefix(*parent)) + block for parent, block in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


def test_a_namespace_without_a_bottom_is_refused():
    namespace: tuple = ()
    for _ in range(100_000):
        namespace = (namespace,)
    with pytest.raises(InvalidNamespace, match="nested too deep"):
        root_prefix(namespace)


@settings(max_examples=100, derandomize=True)
@given(NAMESPACES)
def test_a_namespace_is_read_back_from_its_encoding_with_its_types(namespace):
    found = namespace_of(root_prefix(namespace))
    assert repr(found) == repr(namespace)

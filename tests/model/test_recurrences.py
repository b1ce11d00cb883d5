"""Recurrences in C over states on pages: what a loop over tokens computes, and bits that depend neither on how a row is cut nor on other rows."""

# ruff: noqa: F401  # the calls of the file take them from here

import ctypes
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from paged.attention import LayeredPool, StatePlace
from paged.errors import UnsupportedModel
from paged.model.hook import under_way
from paged.model.native import recurrences
from paged.model.native.recurrences import (
    MOST_KEY_SIZE,
    MOST_TAPS,
    RowPages,
    advance_delta_rule,
    advance_scan,
    advance_selective_scan,
    convolve,
)
from paged.model.states.layer import FirstToken, follow_states

from ..shown import assert_refused, shown_in  # noqa: TID252

PAGES, DTYPES = 9, (torch.float32, torch.bfloat16)
# Around a vector of 4, 8 or 16 numbers, and a tile of 64.
SIZES = st.sampled_from([1, 3, 8, 16, 17, 40, 64, 70])


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Convolution:
    """Channels and taps; a state in four units."""

    def __init__(self, channels, taps, dtype=torch.float32, *, has_bias=True, has_silu=True):
        self.shape, self.dtype, self.units = (channels, taps - 1), dtype, min(4, channels)
        self.weight, self.bias = drawn(taps, channels), drawn(channels, seed=1) if has_bias else None
        self.has_silu = has_silu

    def tokens(self, count, seed):
        # Wider than what is convolved: rows are a slice of something.
        return [drawn(count, self.shape[0] + 5, seed=seed).to(self.dtype)]

    def run(self, tokens, starts, rows):
        return convolve(tokens[0][:, 2:-3], self.weight, self.bias, starts, rows, has_silu=self.has_silu)

    def slowly(self, tokens, state):
        x = torch.cat([state.T, tokens[0][:, 2:-3]]).double()
        taps = len(self.weight)
        out = torch.stack([(x[t : t + taps] * self.weight.double()).sum(0) for t in range(len(x) - taps + 1)])
        out += 0 if self.bias is None else self.bias.double()
        return torch.nn.functional.silu(out) if self.has_silu else out, x[len(x) - taps + 1 :].T


class DeltaRule:
    """Heads that share keys two by two; a state in a unit a head."""

    def __init__(self, heads, key_size, value_size, *, is_normed=True, has_many_decays=False):
        self.shape, self.dtype, self.units = (2 * heads, key_size, value_size), torch.float32, 2 * heads
        self.is_normed, self.decays = is_normed, (key_size,) if has_many_decays else ()

    def tokens(self, count, seed):
        heads, key_size, value_size = self.shape
        queries, keys = (drawn(count, heads // 2, key_size, seed=seed + i) for i in (0, 1))
        if not self.is_normed:
            keys = keys / keys.norm(dim=-1, keepdim=True)
        values, decay, beta = (
            drawn(count, heads, *size, seed=seed + 2 + i) for i, size in enumerate([(value_size,), self.decays, ()])
        )
        return [queries, keys, values, -decay.abs(), beta.sigmoid()]

    def run(self, tokens, starts, rows):
        names = ("queries", "keys", "values", "decay", "beta")
        return advance_delta_rule(
            **dict(zip(names, tokens, strict=True)), starts=starts, rows=rows, is_normed=self.is_normed
        )

    def slowly(self, tokens, state):
        queries, keys, values, decay, beta = (each.double() for each in tokens)
        queries, keys = (each.repeat_interleave(2, 1) for each in (queries, keys))
        if self.is_normed:
            queries, keys = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (queries, keys))
        state, out = state.double(), []
        for q, k, v, g, b in zip(queries / math.sqrt(queries.shape[-1]), keys, values, decay, beta, strict=True):
            state = state * g.exp().reshape(len(g), -1, 1)
            change = (v - (state * k[..., None]).sum(1)) * b[:, None]
            state = state + k[..., None] * change[:, None]
            out.append((state * q[..., None]).sum(1))
        return torch.stack(out), state


class Scan:
    """Heads that share B and C two by two; a state in a unit a head."""

    function = staticmethod(advance_scan)

    def __init__(self, heads, head_size, state_size, *, has_skip=True):
        self.shape, self.dtype, self.units = (2 * heads, head_size, state_size), torch.float32, 2 * heads
        self.decay, self.skip = -drawn(2 * heads).exp(), drawn(2 * heads, seed=1) if has_skip else None

    def tokens(self, count, seed):
        heads, head_size, state_size = self.shape
        x, step = drawn(count, heads, head_size, seed=seed), drawn(count, heads, seed=seed + 1).abs()
        return [x, step, *(drawn(count, heads // 2, state_size, seed=seed + 2 + i) for i in (0, 1))]

    def run(self, tokens, starts, rows):
        x, step, *given = tokens
        given = {"given": tuple(given), "decay": self.decay, "skip": self.skip}
        return self.function(x=x, step=step, **given, starts=starts, rows=rows)

    def slowly(self, tokens, state):
        x, step, b, c = (each.double() for each in tokens)
        b, c, state, out = b.repeat_interleave(2, 1), c.repeat_interleave(2, 1), state.double(), []
        skip = torch.zeros(len(self.decay)) if self.skip is None else self.skip
        for x_t, dt, b_t, c_t in zip(x, step, b, c, strict=True):
            lost = (dt * self.decay.double()).exp()
            state = state * lost[:, None, None] + (x_t * dt[:, None])[..., None] * b_t[:, None]
            out.append((state * c_t[:, None]).sum(-1) + skip.double()[:, None] * x_t)
        return torch.stack(out), state


class SelectiveScan(Scan):
    """Channels, in up to five units."""

    function = staticmethod(advance_selective_scan)

    def __init__(self, channels, state_size, *, has_skip=True):
        self.shape, self.dtype, self.units = (channels, state_size), torch.float32, min(5, channels)
        self.decay, self.skip = -drawn(channels, state_size).exp(), drawn(channels, seed=1) if has_skip else None

    def tokens(self, count, seed):
        channels, state_size = self.shape
        x, step = drawn(count, channels, seed=seed), drawn(count, channels, seed=seed + 1).abs()
        return [x, step, *(drawn(count, state_size, seed=seed + 2 + i) for i in (0, 1))]

    def slowly(self, tokens, state):
        x, step, b, c = (each.double() for each in tokens)
        state, out = state.double(), []
        skip = torch.zeros(len(self.decay)) if self.skip is None else self.skip
        for x_t, dt, b_t, c_t in zip(x, step, b, c, strict=True):
            state = state * (dt[:, None] * self.decay.double()).exp() + (x_t * dt)[:, None] * b_t
            out.append((state * c_t).sum(-1) + skip.double() * x_t)
        return torch.stack(out), state


KINDS = st.one_of(
    st.builds(
        Convolution, st.sampled_from([1, 7, 16, 61, 64, 530]), st.integers(2, 4) | st.just(MOST_TAPS),
        st.sampled_from(DTYPES), has_bias=st.booleans(), has_silu=st.booleans(),
    ),
    st.builds(DeltaRule, st.integers(1, 2), SIZES, SIZES, is_normed=st.booleans(), has_many_decays=st.booleans()),
    st.builds(Scan, st.integers(1, 2), SIZES, SIZES, has_skip=st.booleans()),
    st.builds(SelectiveScan, SIZES, SIZES, has_skip=st.booleans()),
)  # fmt: skip
TOKENS = st.integers(1, 9)


class Memory:
    """States on three pages each, units dealt to them in turn; whatever nobody wrote is NaN."""

    def __init__(self, kind):
        self.kind = kind
        size = -(-kind.shape[0] // kind.units) * math.prod(kind.shape[1:]) * kind.dtype.itemsize
        self.size = -(-size // 16) * 16
        places = [(unit % 3, 32 + unit // 3 * self.size) for unit in range(kind.units)]
        self.pool = LayeredPool(
            {},
            num_blocks=3 * PAGES,
            page_bytes=48 + 2 * self.size * -(-kind.units // 3),
            block_size=1,
            states=[[StatePlace(places, self.size, kind.shape, kind.dtype)]],
            state_group=0,
        )
        self.pool.poison(torch.arange(3 * PAGES))
        self.state = self.pool.states[0][0]

    def pages(self, numbers):
        """int32 [n, 3]: those of states of these numbers; -1: none."""
        found = np.array([[-1] * 3 if n < 0 else [n, PAGES + n, 2 * PAGES + n] for n in numbers], np.int32)
        return found.reshape(-1, 3)

    def at(self, number):
        return self.state.read(torch.from_numpy(self.pages([number])))[0]

    def put(self, number, state):
        self.state.write(torch.from_numpy(self.pages([number])), state[None])

    def run(self, shares, read, write, padding=0):
        """Results of each share's tokens, states being read and written at these numbers."""
        starts = np.cumsum([0, *(len(each[0]) for each in shares)])
        tokens = [torch.cat(each) for each in zip(*shares, strict=True)]
        if padding:
            tokens = [torch.cat([each, each.new_full((padding, *each.shape[1:]), torch.nan)]) for each in tokens]
        out = self.kind.run(tokens, starts, RowPages(self.state, self.pages(read), self.pages(write)))
        assert (out[starts[-1] :] == 0).all()
        return out[: starts[-1]].split(np.diff(starts).tolist())


def is_near(found, expected, dtype):
    most = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(
        found.double() / most, expected / most, rtol=0, atol=2e-5 if dtype == torch.float32 else 0.02
    )


@settings(max_examples=40, derandomize=True, deadline=None)
@given(KINDS, TOKENS, st.booleans(), st.booleans())
def test_a_row_is_a_loop_over_its_tokens(kind, count, is_new, in_place):
    memory, tokens = Memory(kind), kind.tokens(count, 3)
    state = torch.zeros(kind.shape) if is_new else drawn(*kind.shape, seed=2).to(kind.dtype)
    if not is_new:
        memory.put(0, state)
    write = 0 if in_place else 1
    (found,) = memory.run([tokens], [-1 if is_new else 0], [write], padding=2)
    out, after = kind.slowly(tokens, state)
    is_near(found, out, kind.dtype)
    is_near(memory.at(write), after, kind.dtype)
    if not (is_new or in_place):
        assert torch.equal(memory.at(0), state), "what is read is not written"


@settings(max_examples=40, derandomize=True, deadline=None)
@given(KINDS, st.lists(TOKENS, min_size=1, max_size=4), st.lists(TOKENS, min_size=1, max_size=3), st.data())
def test_bits_depend_neither_on_cuts_nor_on_other_rows(kind, cuts, others, data):
    whole = kind.tokens(sum(cuts), 3)
    alone = Memory(kind)
    (expected,) = alone.run([whole], [-1], [0])
    memory, parts, number = Memory(kind), [], -1
    for i, (first, count) in enumerate(zip(np.cumsum([0, *cuts[:-1]]), cuts, strict=True)):
        place = data.draw(st.integers(0, len(others)))
        shares = [kind.tokens(each, 20 + i) for each in others]
        shares.insert(place, [each[first : first + count] for each in whole])
        write = list(range(1 + len(others), 1 + 2 * len(others)))
        write.insert(place, 0 if i % 2 else 1)
        read = [-1] * len(others)
        read.insert(place, number)
        # Other rows that start anew write where nobody reads.
        parts.append(memory.run(shares, read, write, padding=i)[place])
        number = write[place]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(memory.at(number), alone.at(0))


@settings(max_examples=12, derandomize=True, deadline=None)
@given(KINDS)
def test_a_row_that_is_written_nowhere_has_its_results_and_changes_nothing(kind):
    memory, tokens = Memory(kind), kind.tokens(3, 3)
    memory.put(0, drawn(*kind.shape, seed=2).to(kind.dtype))
    (expected,) = memory.run([tokens], [0], [1])
    before = memory.pool.pages.on_device.clone()
    found, _ = memory.run([tokens, kind.tokens(2, 4)], [0, -1], [-1, -1])
    assert torch.equal(found, expected)
    assert torch.equal(memory.pool.pages.on_device, before)


@settings(max_examples=12, derandomize=True, deadline=None)
@given(KINDS, st.booleans())
def test_a_row_without_tokens_has_its_state_where_it_goes(kind, is_new):
    memory, state = Memory(kind), drawn(*kind.shape, seed=2).to(kind.dtype)
    memory.put(0, state)
    nothing = [each[:0] for each in kind.tokens(1, 3)]
    memory.run([kind.tokens(2, 4), nothing, kind.tokens(1, 5)], [-1, -1 if is_new else 0, -1], [1, 2, 3])
    assert torch.equal(memory.at(2), torch.zeros_like(state) if is_new else state)
    assert torch.equal(memory.at(0), state)


@pytest.mark.parametrize(
    "kind",
    [Convolution(4096, 4), DeltaRule(8, 64, 64), Scan(8, 64, 64), SelectiveScan(640, 16)],
    ids=lambda kind: type(kind).__name__,
)
def test_the_number_of_threads_changes_nothing(kind, on_any_threads):
    shares = [kind.tokens(count, count) for count in (1, 9, 4)]

    def run():
        memory = Memory(kind)
        return [*memory.run(shares, [-1] * 3, [0, 1, 2]), *map(memory.at, range(3))]

    assert on_any_threads(run)


def test_memory_that_c_lacks_is_an_error(monkeypatch):
    def lack(call, rows):
        ctypes.c_int64.from_address(rows._obj.lacks_memory).value = 1

    kind = Scan(1, 3, 8)
    memory = Memory(kind)
    monkeypatch.setattr(recurrences, "model_library", lambda: SimpleNamespace(paged_advance_scan=lack))
    with pytest.raises(MemoryError, match="a state that is not kept"):
        memory.run([kind.tokens(3, 3)], [-1], [-1])


def test_two_rows_read_one_state():
    kind = DeltaRule(1, 16, 16)
    memory, tokens = Memory(kind), kind.tokens(2, 3)
    memory.put(0, drawn(*kind.shape, seed=2))
    found = memory.run([tokens, tokens], [0, 0], [1, 2])
    assert torch.equal(*found)
    assert torch.equal(memory.at(1), memory.at(2))


def told(kind=None, *, memory=None, **others):
    """Three tokens of which some arguments are others; refused, they change nothing."""
    kind = kind or DeltaRule(1, 16, 16)
    memory, tokens = memory or Memory(kind), kind.tokens(3, 3)
    for name, each in others.items():
        tokens[("queries", "keys", "values", "decay", "beta").index(name)] = each
    memory.kind, before = kind, memory.pool.pages.on_device.clone()
    try:
        memory.run([tokens], [-1], [0])
    finally:
        assert torch.equal(memory.pool.pages.on_device, before)


@pytest.mark.parametrize(("call", "shown"), shown_in("model/refused_recurrences.txt", ">>>"))
def test_what_is_too_large_or_of_another_shape_is_refused_and_nothing_is_written(call, shown):
    assert isinstance(assert_refused(call, shown, globals()), UnsupportedModel)


IN_C = "qwen3_next", "mamba2", "falcon_h1", "lfm2", "jamba"


@pytest.mark.parametrize("family", [*IN_C, "minimax", "recurrent_gemma"])
def test_a_layer_whose_recurrence_is_known_is_in_c_and_any_other_goes_through_its_module(loaded, family):
    assert {layer.is_in_c for layer in loaded(family).state_layers} == {family in IN_C}


class Layer(torch.nn.Module):
    """A short convolution as transformers' modules have one, which finds its function by name."""

    layer_idx = 0

    def __init__(self, factor=1.0, activation=None):
        super().__init__()
        self.weight, self.factor, self.activation = drawn(6, 3), factor, activation

    def forward(self, hidden_states, cache_params=None):
        x = cache_params.update_conv_state(hidden_states.transpose(1, 2), self.layer_idx, conv_kernel_size=3)
        out = causal_conv1d_fn(x, self.weight.to(x), None, activation=self.activation, factor=self.factor)
        return out[..., -hidden_states.shape[1] :].transpose(1, 2)


class LayerOfAnotherVersion(Layer):
    """It names an argument that transformers' modules have under another name."""

    def forward(self, hidden_states, cache_params=None):
        x = cache_params.update_conv_state(hidden_states.transpose(1, 2), self.layer_idx, conv_kernel_size=3)
        out = causal_conv1d_fn(x=x, weight=self.weight.to(x), bias=None, activation=None, factor=1.0)
        return out[..., -hidden_states.shape[1] :].transpose(1, 2)


def causal_conv1d_fn(x, weight, bias, activation, factor):
    out = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=2, groups=len(weight))[..., : x.shape[-1]]
    return getattr(torch.nn.functional, activation or "dropout")(out * factor, *([] if activation else [0.0]))


@pytest.mark.parametrize(
    ("layer", "dtype", "is_in_c"),
    [
        (Layer(), torch.float32, True), (Layer(), torch.bfloat16, True),
        (Layer(activation="silu"), torch.float32, True), (Layer(activation="gelu"), torch.float32, False),
        (Layer(factor=1.01), torch.float32, False), (Layer(), torch.float64, False),
        (LayerOfAnotherVersion(), torch.float32, False),
    ],
    ids=["as it is", "in bfloat16", "silu", "other activation", "other answer", "other dtype", "other names"],
)  # fmt: skip
def test_a_layer_is_held_against_its_module(layer, dtype, is_in_c):
    layers = follow_states(torch.nn.ModuleList([layer]))
    with torch.inference_mode(), under_way(SimpleNamespace(states=FirstToken(layers, torch.device("cpu")))):
        layer(drawn(1, 1, 6).to(dtype))
    assert layers[0].is_in_c == is_in_c

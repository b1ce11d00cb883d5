"""Reading traces: what each format's columns become, and what a damaged file is told."""

import json

import numpy as np
import pytest

from paged.errors import TraceError
from paged.study.traces import EXCERPTS, excerpt_path, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}\n'
PLAIN = "arrival_s,prompt_tokens,output_tokens,prefix_id,prefix_tokens\n"


@pytest.fixture
def trace_of(tmp_path):
    def read(text, **options):
        path = tmp_path / "trace"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_trace(path, **options)

    return read


def test_azure_times_count_from_the_first_request_and_lengths_are_kept(trace_of):
    trace = trace_of(AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.1805900,396,109\n")
    assert trace.arrival_s == pytest.approx([0.0, 3.5])
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]


def test_azure_prompts_differ_from_their_first_token_on_and_depend_on_the_seed(trace_of):
    text = AZURE + "2023-11-16 18:15:46,20,1\n2023-11-16 18:15:47,20,1\n"
    first, second = (trace_of(text).prompt(i) for i in (0, 1))
    assert first[0] != second[0]
    assert np.array_equal(first, trace_of(text).prompt(0))
    assert not np.array_equal(first, trace_of(text, seed=1).prompt(0))


def test_a_timestamp_with_a_time_zone_is_read_as_that_moment(trace_of):
    trace = trace_of(AZURE + "2024-05-10 00:00:00+00:00,5,5\n2024-05-10 02:00:01+02:00,5,5\n")
    assert trace.arrival_s.tolist() == [0.0, 1.0]


def test_mooncake_milliseconds_are_seconds_and_the_last_id_is_what_is_left(trace_of):
    trace = trace_of(MOONCAKE + MOONCAKE.replace(": 0", ": 1500"))
    assert trace.arrival_s.tolist() == [0.0, 1.5]
    assert trace.prompt_tokens.tolist() == [600, 600]
    assert trace.segment_lengths.tolist() == [512, 88, 512, 88]


def test_equal_hash_ids_are_equal_tokens_wherever_they_stand_and_however_long_they_are(trace_of):
    other = '{"timestamp": 1, "input_length": 1100, "output_length": 1, "hash_ids": [7, 4, 9]}\n'
    trace = trace_of(MOONCAKE + other)
    first, second = trace.prompt(0), trace.prompt(1)
    assert np.array_equal(first[:512], second[512:1024])
    assert np.array_equal(first[512 : 512 + 76], second[1024:])
    assert first[0] != second[0]


def test_different_hash_ids_differ_in_their_very_first_token(trace_of):
    lines = [
        json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [h]}) for h in (0, 1, 2**30 - 1)
    ]
    trace = trace_of("\n".join(lines))
    assert len({int(trace.prompt(i)[0]) for i in range(3)}) == 3


def test_prompts_are_token_ids_int32_and_not_negative():
    trace = read_trace(excerpt_path("mooncake"))
    for i in range(0, len(trace), 17):
        prompt = trace.prompt(i)
        assert prompt.dtype == np.int32
        assert len(prompt) == trace.prompt_tokens[i]
        assert prompt.min() >= 0


def test_our_own_csv_and_json_lines_are_the_same_trace(trace_of):
    columns = PLAIN.strip().split(",")
    rows = [[0.5, 30, 4, "bot", 20], [2.0, 50, 5, "bot", 25], [2.0, 9, 1, None, None]]
    as_csv = trace_of(PLAIN + "\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in rows))
    as_json = trace_of("\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows))
    for i in range(3):
        assert np.array_equal(as_csv.prompt(i), as_json.prompt(i))
    assert as_csv.arrival_s.tolist() == as_json.arrival_s.tolist() == [0.0, 1.5, 1.5]
    shared = np.equal(as_csv.prompt(0), as_csv.prompt(1)[:30])
    assert shared[:20].all()
    assert not shared[20]


def test_columns_come_in_any_order_and_unknown_ones_are_ignored(trace_of):
    trace = trace_of("output_tokens, region ,arrival_s,prompt_tokens\n3,eu,1,8\n\n4,us,2,9\n")
    assert trace.prompt_tokens.tolist() == [8, 9]
    assert trace.output_tokens.tolist() == [3, 4]


def test_a_byte_order_mark_and_windows_line_ends_are_read(trace_of):
    trace = trace_of(b"\xef\xbb\xbf" + AZURE.replace("\n", "\r\n").encode() + b"2023-11-16 18:15:46,20,1\r\n")
    assert len(trace) == 1


def test_a_limit_reads_no_further(trace_of):
    assert len(trace_of(MOONCAKE + MOONCAKE + "damaged", limit=2)) == 2


def test_scaling_keeps_what_was_shared_and_leaves_no_length_at_zero(trace_of):
    other = '{"timestamp": 3000, "input_length": 1030, "output_length": 1, "hash_ids": [4, 9, 5]}\n'
    scaled = trace_of(MOONCAKE + other).scaled(rate=2, prompts=1 / 32, outputs=1 / 8)
    assert scaled.arrival_s.tolist() == [0.0, 1.5]
    assert scaled.segment_lengths.tolist() == [16, 3, 16, 16, 1]
    assert scaled.output_tokens.tolist() == [1, 1]
    assert np.array_equal(scaled.prompt(0)[:19], scaled.prompt(1)[:19])


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_a_positive_number_is_refused(trace_of, scale):
    with pytest.raises(ValueError, match="must be a positive number"):
        trace_of(MOONCAKE).scaled(prompts=scale)


@pytest.mark.parametrize("name", sorted(EXCERPTS))
def test_every_excerpt_is_small_and_can_be_read(name):
    path = excerpt_path(name)
    assert path.stat().st_size < 100_000
    assert len(read_trace(path)) >= 300


def plain(*rows):
    return PLAIN + "".join(f"{row}\n" for row in rows)


def mooncake(**changes):
    record = {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]} | changes
    return MOONCAKE + json.dumps(record) + "\n"


DAMAGED = {
    "no bytes": ("", None, None, "empty"),
    "only blank lines": ("\n \n", None, None, "empty"),
    "only a header": (AZURE, None, None, "empty"),
    "an unknown header": ("when,what\n1,2\n", 1, None, "known in CSV are azure: TIMESTAMP"),
    "a header without one column": ("arrival_s,prompt_tokens\n1,2\n", 1, "output_tokens", "missing"),
    "an unknown object": ('{"when": 1}\n', 1, None, "known in JSON Lines are mooncake"),
    "a list for an object": ("[1, 2]\n", 1, 1, "not a JSON object"),
    "not UTF-8": (AZURE.encode() + b"\xff\xfe\n", 2, None, "UTF-8"),
    "an open quotation": (AZURE + '"2023-11-16 18:15:46,20,1\n', 2, None, "not CSV"),
    "too few cells": (AZURE + "2023-11-16 18:15:46,20\n", 2, None, "2 cells, but the header has 3"),
    "no date": (AZURE + "yesterday,20,1\n", 2, "TIMESTAMP", '"yesterday" is not a date'),
    "no number": (AZURE + "2023-11-16 18:15:46,many,1\n", 2, "ContextTokens", '"many" is not a whole number'),
    "half a token": (AZURE + "2023-11-16 18:15:46,2.5,1\n", 2, "ContextTokens", '"2.5" is not a whole number'),
    "no output": (AZURE + "2023-11-16 18:15:46,20,0\n", 2, "GeneratedTokens", "at least 1"),
    "fewer than no tokens": (AZURE + "2023-11-16 18:15:46,-20,1\n", 2, "ContextTokens", "at least 1"),
    "more tokens than a model reads": (plain("0,99999999,1,,"), 2, "prompt_tokens", "at most 10,000,000"),
    "unsorted": (AZURE + "2023-11-16 18:15:46,2,1\n2023-11-16 18:15:45,2,1\n", 3, "TIMESTAMP", "1 s before"),
    "a line cut short": (MOONCAKE + '{"timestamp": 0, "input_le', 2, 27, "not JSON"),
    "a line that is no JSON": (MOONCAKE + '{"timestamp": x}', 2, 15, "not JSON"),
    "nesting without end": (MOONCAKE + "[" * 100_000, 2, None, "not"),
    "an id too few": (mooncake(hash_ids=[4]), 2, "hash_ids", "1 ids, but 600 tokens are 2 blocks"),
    "an id that is text": (mooncake(hash_ids=[4, "x"]), 2, "hash_ids", '"x" is not an id'),
    "an id below zero": (mooncake(hash_ids=[4, -1]), 2, "hash_ids", '"-1" is not an id'),
    "no ids": (mooncake(hash_ids=None), 2, "hash_ids", "nothing is not a list"),
    "true for a length": (mooncake(input_length=True), 2, "input_length", "not a whole number"),
    "a missing length": (MOONCAKE + '{"timestamp": 0, "hash_ids": [1]}', 2, "input_length", "nothing is not"),
    "time below zero": (plain("-1,2,1,,"), 2, "arrival_s", "not negative"),
    "time that is no number": (plain("nan,2,1,,"), 2, "arrival_s", "finite"),
    "a prefix without a length": (plain("0,9,1,bot,"), 2, "prefix_tokens", 'nothing, but prefix_id is "bot"'),
    "a length without a prefix": (plain("0,9,1,,5"), 2, "prefix_id", "prefix_tokens is 5"),
    "a prefix longer than the prompt": (plain("0,9,1,bot,10"), 2, "prefix_tokens", "10 of a prompt of 9"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_trace_says_file_line_and_column(trace_of, tmp_path, case):
    text, line, column, problem = DAMAGED[case]
    with pytest.raises(TraceError) as caught:
        trace_of(text)
    error = caught.value
    assert (error.path, error.line) == (str(tmp_path / "trace"), line)
    assert column is None or error.column == column
    assert problem in str(error)
    assert "\n" not in str(error)
    assert str(error).startswith(error.path)

"""Reading traces: what each format's columns become, and what a damaged file is told."""

import json
from dataclasses import replace

import numpy as np
import pytest

from paged.errors import InvalidConfig
from paged.study.traces import EXCERPTS, Trace, excerpt_path, read_trace, save_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}\n'
ROW = {"arrival_s": 0, "output_tokens": 4, "segments": [[7, 6], [None, 2]]}
PLAIN = "arrival_s,prompt_tokens,output_tokens,prefix_id,prefix_tokens\n"


@pytest.fixture
def trace_of(tmp_path):
    def read(text, **options):
        path = tmp_path / "trace"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_trace(path, **options)

    return read


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("text", "arrival_s", "prompts", "outputs"),
    [
        # Times count from the first request, in whatever zone they are.
        (AZURE + "2023-11-16 18:15:46.68059,374,44\n2023-11-16 18:15:50.18059,9,10\n", [0, 3.5], [374, 9], [44, 10]),
        (AZURE + "2024-05-10 00:00:00+00:00,5,6\n2024-05-10 02:00:01+02:00,5,6\n", [0, 1], [5, 5], [6, 6]),
        # Columns come in any order, and unknown ones are ignored.
        ("output_tokens, region ,arrival_s,prompt_tokens\n3,eu,1,8\n\n4,us,2,9\n", [0, 1], [8, 9], [3, 4]),
        # As Windows writes it, with a byte order mark.
        (b"\xef\xbb\xbf" + AZURE[:-1].encode() + b"\r\n2023-11-16 18:15:46,20,1\r\n", [0], [20], [1]),
    ],
)
def test_a_table_becomes_arrivals_and_lengths(trace_of, text, arrival_s, prompts, outputs):
    trace = trace_of(text)
    assert trace.arrival_s == pytest.approx(arrival_s)
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == (prompts, outputs)


def test_azure_prompts_differ_from_their_first_token_on_and_depend_on_the_seed(trace_of):
    text = AZURE + "2023-11-16 18:15:46,20,1\n2023-11-16 18:15:47,20,1\n"
    first, second = (trace_of(text).prompt(i) for i in (0, 1))
    assert first[0] != second[0]
    assert np.array_equal(first, trace_of(text).prompt(0))
    assert not np.array_equal(first, trace_of(text, seed=1).prompt(0))


def test_mooncake_milliseconds_are_seconds_and_the_last_id_is_what_is_left(trace_of):
    trace = trace_of(MOONCAKE + MOONCAKE.replace(": 0", ": 1500"))
    assert (trace.arrival_s.tolist(), trace.prompt_tokens.tolist()) == ([0.0, 1.5], [600, 600])
    assert trace.segment_lengths.tolist() == [512, 88, 512, 88]


def test_equal_hash_ids_are_equal_tokens_wherever_they_stand_and_however_long_they_are(trace_of):
    other = '{"timestamp": 1, "input_length": 1100, "output_length": 1, "hash_ids": [7, 4, 9]}\n'
    trace = trace_of(MOONCAKE + other)
    first, second = trace.prompt(0), trace.prompt(1)
    assert np.array_equal(first[:512], second[512:1024])
    assert np.array_equal(first[512 : 512 + 76], second[1024:])
    one = {"timestamp": 0, "input_length": 1, "output_length": 1}
    trace = trace_of(lines(*(one | {"hash_ids": [id]} for id in (0, 1, 2**30 - 1))))
    assert len({int(trace.prompt(i)[0]) for i in range(3)}) == 3


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


def test_a_limit_reads_no_further(trace_of):
    assert len(trace_of(MOONCAKE + MOONCAKE + "damaged", limit=2)) == 2


def test_scaling_keeps_what_was_shared_and_leaves_no_length_at_zero(trace_of):
    other = '{"timestamp": 3000, "input_length": 1030, "output_length": 1, "hash_ids": [4, 9, 5]}\n'
    scaled = trace_of(MOONCAKE + other).scaled(rate=2, prompts=1 / 32, outputs=1 / 8)
    assert (scaled.arrival_s.tolist(), scaled.segment_lengths.tolist()) == ([0.0, 1.5], [16, 3, 16, 16, 1])
    assert scaled.output_tokens.tolist() == [1, 1]
    assert np.array_equal(scaled.prompt(0)[:19], scaled.prompt(1)[:19])


@pytest.mark.parametrize("name", sorted(EXCERPTS))
def test_every_excerpt_is_small_and_can_be_read(name):
    path = excerpt_path(name)
    assert path.stat().st_size < 100_000
    assert len(read_trace(path)) >= 300


def test_segments_with_one_id_are_the_same_tokens_wherever_they_stand(trace_of):
    trace = trace_of(lines(ROW, ROW | {"segments": [[3, 5], [7, 9]]}))
    assert trace.prompt_tokens.tolist() == [8, 14]
    assert np.array_equal(trace.prompt(0)[:6], trace.prompt(1)[5:11])
    assert not (trace.prompt(0)[6:] == trace.prompt(1)[11:13]).all()


def test_what_is_declared_is_read_and_what_is_not_said_is_nothing(trace_of):
    trace = trace_of(lines(ROW | {"max_tokens": 9, "priority": -2, "tenant": " acme ", "output_id": 5}, ROW))
    assert (trace.max_tokens.tolist(), trace.priority.tolist()) == ([9, 0], [-2, 0])
    assert (trace.tenant.tolist(), trace.output_ids.tolist()) == (["acme", ""], [5, -1])
    trace = trace_of("arrival_s,prompt_tokens,output_tokens,max_tokens,priority,tenant\n0,5,4,9,1,acme\n1,5,4,,,\n")
    assert (trace.max_tokens.tolist(), trace.priority.tolist()) == ([9, 0], [1, 0])
    assert trace.tenant.tolist() == ["acme", ""]


def test_a_request_that_says_nothing_special_is_a_short_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    save_trace(Trace.from_lengths([0.0, 1.5], [3, 4], [5, 6]), path)
    assert json.loads(path.read_text().splitlines()[1]) == {"arrival_s": 1.5, "prompt_tokens": 4, "output_tokens": 6}


def test_a_tenant_that_would_not_come_back_is_refused_before_anything_is_written(tmp_path):
    trace = replace(Trace.from_lengths([0], [3], [5]), tenant=np.array([" "]))
    path = tmp_path / "trace.jsonl"
    with pytest.raises(InvalidConfig, match=r"tenant ' ' is no name"):
        save_trace(trace, path)
    assert not path.exists()

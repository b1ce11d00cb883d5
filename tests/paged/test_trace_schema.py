"""Our own schema beyond arrival and two lengths: segments, what was declared, by whom, and what a wrong row is told."""

import json
from dataclasses import replace

import numpy as np
import pytest

from paged.errors import InvalidConfig
from paged.study.traces import Trace, read_trace, save_trace

ROW = {"arrival_s": 0, "output_tokens": 4, "segments": [[7, 6], [None, 2]]}


@pytest.fixture
def trace_of(tmp_path):
    def read(*rows):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_trace(path)

    return read


def test_segments_with_one_id_are_the_same_tokens_wherever_they_stand(trace_of):
    trace = trace_of(ROW, ROW | {"segments": [[3, 5], [7, 9]]})
    assert trace.prompt_tokens.tolist() == [8, 14]
    assert np.array_equal(trace.prompt(0)[:6], trace.prompt(1)[5:11])
    assert not (trace.prompt(0)[6:] == trace.prompt(1)[11:13]).all()


def test_what_is_declared_is_read_and_what_is_not_said_is_nothing(trace_of):
    trace = trace_of(ROW | {"max_tokens": 9, "priority": -2, "tenant": " acme ", "output_id": 5}, ROW)
    assert (trace.max_tokens.tolist(), trace.priority.tolist()) == ([9, 0], [-2, 0])
    assert (trace.tenant.tolist(), trace.output_ids.tolist()) == (["acme", ""], [5, -1])


def test_csv_has_the_same_columns_but_segments(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,max_tokens,priority,tenant\n0,5,4,9,1,acme\n1,5,4,,,\n")
    trace = read_trace(path)
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

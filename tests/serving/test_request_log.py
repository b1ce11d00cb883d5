"""The request log: what a line says, and that a stream which is full, closed or asleep costs lines and nothing else."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from paged.serving.request_log import MOST_BYTES, MOST_LINES, RequestLog

from ..driving import wait_until  # noqa: TID252
from .samples import RECORD  # noqa: TID252

SAID = (
    '{"time":"2026-01-02T03:04:05.678Z","level":"info","id":"cmpl-1","endpoint":"/v1/completions","tenant":"research",'
    '"status":200,"finish_reason":"length","error":null,"prompt_tokens":40,"cached_tokens":30,"output_tokens":32,'
    '"recomputed_tokens":7,"preemptions":3,"longest_pause_s":0.75,"waited_s":0.25,"ttft_s":0.5,"e2e_s":2.25,'
    '"n":2,"max_tokens":20,"streams":false}\n'
)
MOMENT = 1767323045.678


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log"


def lines(text):
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")]


def written(path, *records, **options):
    with path.open("ab") as file:
        log = RequestLog(file, clock=lambda: MOMENT, **options)
        for record in records:
            log.write(record)
        log.close(timeout_s=600)
        assert log.lost == 0
    return path.read_text()


@pytest.mark.parametrize(("asks", "more"), [(False, ""), (True, ',"prompt":"a secret","answer":"an answer"')])
def test_a_request_is_a_line_whose_fields_are_in_this_order_with_texts_where_they_are_asked_for(path, asks, more):
    assert written(path, RECORD, with_prompts=asks) == SAID.replace("}\n", more + "}\n")


def test_what_did_not_happen_is_null_and_the_level_is_the_statuss(path):
    refused = replace(RECORD, begun=None, first=None, last=None, finish_reason="", error="overloaded")
    said = lines(written(path, *(replace(refused, status=status) for status in (200, 429, 499, 500))))
    assert [line["level"] for line in said] == ["info", "warning", "warning", "error"]
    line = said[0]
    assert (line["waited_s"], line["ttft_s"], line["e2e_s"], line["error"]) == (None, None, 2.25, "overloaded")


moments = st.none() | st.floats(0, 1e9)


@given(begun=moments, first=moments, ended=moments, pause=st.floats(-1, 1))
def test_no_duration_is_negative_whatever_the_moments_are(tmp_path_factory, begun, first, ended, pause):
    record = replace(RECORD, begun=begun, first=first, ended=ended, longest_pause_s=pause)
    (line,) = lines(written(tmp_path_factory.mktemp("log") / "log", record))
    said = [line[name] for name in ("waited_s", "ttft_s", "e2e_s", "longest_pause_s")]
    assert [seconds for seconds in said if seconds is not None and seconds < 0] == []


@pytest.mark.parametrize("text", ['"}\n{"level":"x', "\ud800", "Ω\0\x1b[2J\u2028"])
def test_no_name_that_a_client_chose_breaks_a_line(path, text):
    record = replace(RECORD, id=text, tenant=text, prompt=text, answer=text)
    (line,) = lines(written(path, record, with_prompts=True))
    assert {line["id"], line["tenant"], line["prompt"], line["answer"]} == {text.replace("\ud800", "?")}


def test_a_full_disk_costs_lines_which_are_counted_and_said_once_when_there_is_room(path):
    file = os.open("/dev/full", os.O_WRONLY)
    with os.fdopen(file, "wb", buffering=0) as stream, path.open("ab") as room:
        log = RequestLog(stream, clock=lambda: MOMENT)
        for _ in range(3):
            log.write(RECORD)
        wait_until(lambda: log.lost == 3)
        os.dup2(room.fileno(), file)
        log.write(RECORD)
        wait_until(lambda: path.read_text().count("\n") == 2)
        log.write(RECORD)
        log.close(timeout_s=600)
        assert log.lost == 3
    first, notice, second = path.read_text().splitlines(keepends=True)
    assert (first, second) == (SAID, SAID)
    told = {"level": "warning", "message": "3 lines of this log were lost.", "lost": 3}
    assert json.loads(notice) == {"time": "2026-01-02T03:04:05.678Z", **told}


@pytest.mark.parametrize("blocks", [True, False])
def test_a_reader_that_sleeps_blocks_nobody_and_what_is_kept_and_what_is_lost_is_everything(blocks):
    reader, writer = os.pipe()
    os.set_blocking(writer, blocks)
    number = MOST_LINES + 5000
    with os.fdopen(writer, "wb", buffering=0) as stream, ThreadPoolExecutor() as pool:
        log = RequestLog(stream, clock=lambda: MOMENT)
        # A pipe takes 64 KiB, some 170 lines. With a write that waited this would not come to an end.
        for _ in range(number):
            log.write(RECORD)
        lost = log.lost
        assert lost > 4000
        page = pool.submit(Path(f"/dev/fd/{reader}").read_text)
        log.close(timeout_s=600)
        assert log.lost == lost
        stream.close()
    os.close(reader)
    *said, notice = page.result().splitlines(keepends=True)
    assert (json.loads(notice)["lost"], len(said), set(said)) == (lost, number - lost, {SAID})


LONG = replace(RECORD, prompt="x" * (MOST_BYTES // 4))


def test_lines_with_long_prompts_are_bounded_by_their_bytes():
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb", buffering=0) as stream:
        log = RequestLog(stream, with_prompts=True)
        for _ in range(10):
            log.write(LONG)
        assert log.lost >= 6
        os.close(reader)
        log.close(timeout_s=600)
        assert log.lost == 10


def test_lines_that_have_been_written_leave_room_for_others(path):
    with path.open("wb") as file:
        log = RequestLog(file, with_prompts=True)
        for number in range(1, 7):
            log.write(LONG)
            wait_until(lambda size=number * MOST_BYTES // 4: path.stat().st_size > size)
        log.close(timeout_s=600)
        assert log.lost == 0


def test_closing_beside_a_reader_that_sleeps_does_not_wait_for_it():
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb", buffering=0) as stream:
        log = RequestLog(stream)
        for _ in range(1000):
            log.write(RECORD)
        log.close(timeout_s=0.01)
        assert log.lost >= 800
        log.write(RECORD)
        kept = log.lost
        assert kept >= 801
        # The thread stands in its write, and is let go.
        os.close(reader)
        wait_until(lambda: log.lost > kept)


def test_a_line_that_could_be_written_in_part_does_not_spoil_the_next_one(run_python, repository, path):
    program = f"""
import resource, sys
from paged.serving.records import RequestRecord
from paged.serving.request_log import RequestLog
record = RequestRecord("a", "/v1/completions", 0.0, status=200, ended=1.0)
free = resource.getrlimit(resource.RLIMIT_FSIZE)
with open({str(path)!r}, "ab") as file:
    log = RequestLog(file)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, free[1]))
    log.write(record)
    while not log.lost:
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, free)
    log.write(record)
    log.close(60)
"""
    result = run_python("-c", program, env={"PYTHONPATH": str(repository)})
    assert result.returncode == 0, result.stderr
    torn, whole, notice = path.read_text().splitlines()
    assert (len(torn), json.loads(whole)["id"], json.loads(notice)["lost"]) == (20, "a", 1)


def test_a_program_ends_although_nobody_reads_its_log(run_python, repository):
    program = """
import os
from paged.serving.records import RequestRecord
from paged.serving.request_log import RequestLog
reader, writer = os.pipe()
log = RequestLog(os.fdopen(writer, "wb"))
for _ in range(1000):
    log.write(RequestRecord("a", "/v1/completions", 0.0))
"""
    result = run_python("-c", program, env={"PYTHONPATH": str(repository)}, timeout=600)
    assert (result.returncode, result.stderr) == (0, "")

"""The page about traces: its Python runs, its files can be read, its descriptions can be opened, and it names every key."""

import re

from paged.study.traces import PRESETS, PROCESSES, open_trace, read_trace
from paged.study.traces.opening import KEYS

PAGE = "docs/traces.md"


def test_the_python_of_the_page_runs(page, fences, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (program,) = fences(page, "python")
    exec(compile(program, "traces.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "half(half=2): 250 of 500 requests"
    assert said[1].startswith("fitted(context=4096, how=clip): 250 of 250 requests, ")
    assert said[-1].startswith("2000 ")


def test_the_files_of_the_page_can_be_read(page, fences, tmp_path):
    as_csv, as_json = (text for text in fences(page, "") if "arrival_s" in text)
    path = tmp_path / "trace"
    path.write_text(as_csv)
    assert read_trace(path).prompt_tokens.tolist() == [812, 655, 90]
    path.write_text(as_json)
    trace = read_trace(path)
    first, second = trace.prompt(0), trace.prompt(1)
    assert (second[:812] == first).all()
    assert (second[812:932] == trace.output(0)).all()
    assert len(second) == 812 + 120 + 44


def test_the_descriptions_of_the_page_can_be_opened_and_it_names_every_key_process_and_preset(page):
    specs = re.findall(r"^synthetic:.*$", page, flags=re.MULTILINE)
    assert [len(open_trace(spec)) for spec in specs] == [1000] * 3
    synthetic = page.partition("## Synthetic traces")[2]
    keys = [key for key in KEYS if not re.match("output_", key)]
    assert [name for name in (*keys, *PROCESSES, *PRESETS) if f"`{name}`" not in synthetic] == []

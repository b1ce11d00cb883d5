"""The pages that scripts write of fewer bits: what they say follows from what was measured."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import typer


@pytest.fixture(scope="module")
def scripts(benchmark_script):
    return benchmark_script("quantised_beside_peers"), benchmark_script("kv_formats_tried")


def run(engine, weights, rate, **changes):
    way = {
        "engine": engine,
        "weights": weights,
        "kv": "F16" if engine == "llama.cpp" else "as computed",
        "version": "1",
    }
    return {
        "shape": "tiny",
        "machine": "A",
        "threads": 2,
        **way,
        **dict.fromkeys(("prefill", "1", "8", "32"), rate),
        **changes,
    }


def test_runs_of_other_machines_and_numbers_of_threads_have_tables_of_their_own(scripts):
    peers, _ = scripts
    ours = [run("paged", "int8", 10, **more) for more in ({}, {"threads": 8}, {"machine": "B"})]
    page = peers.page_of([*ours, run("paged", "int8", 30), run("llama.cpp", "Q8_0", 5, note="with a repair")])
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles == ["## A, 2 threads", "## A, 8 threads", "## B, 2 threads"]
    assert page.count("| as computed | " + " | ".join(["20 (10 to 30)"] * 4)) == 1
    assert page.count("| as computed | 10 | 10 | 10 | 10 |") == 2
    assert "llama.cpp's library may be patched: with a repair." in page
    assert "int8: 20 | llama.cpp Q8_0: 5 | 4.00 ×" in page


def test_a_page_says_where_nobody_recorded_what_library_ran(scripts):
    peers, _ = scripts
    assert "or patched, was not recorded" in peers.page_of([run("paged", "int8", 10)])
    assert "may be patched: a repair." in peers.page_of([run("paged", "int8", 10)], "a repair")


def test_a_page_without_runs_is_refused(scripts, monkeypatch, tmp_path):
    peers, _ = scripts
    monkeypatch.setattr(peers, "RESULTS", tmp_path / "none.json")
    with pytest.raises(typer.BadParameter, match="has no runs"):
        peers.main(tmp_path, page=True)
    assert list(tmp_path.iterdir()) == []


def test_the_conclusion_on_kv_formats_follows_from_the_shares(scripts):
    _, tried = scripts
    shares = {(bits, way.name): share for bits, share in ((8, 0.99), (4, 0.8)) for way in tried.ways(bits)}
    shares |= {(bits, "more bits"): share for bits, share in ((5, 0.9), (6, 0.96), (7, 0.98))}
    few = tried.conclusion({**shares, (4, tried.ZERO): 0.83, (4, tried.CENTRED): 0.79})
    for words in (
        "No way of 4 bits has 95%",
        "zero point, has 83.0%",
        "95% takes 6 bits",
        "-1.0 points, a zero point by +3.0",
    ):
        assert words in few
    enough = tried.conclusion({**shares, (4, tried.BUILT): 0.97})
    assert "A way of 4 bits has 95%" in enough
    assert "95% takes 4 bits" in enough
    assert "is not reached with 8 bits" in tried.conclusion(dict.fromkeys(shares, 0.5))

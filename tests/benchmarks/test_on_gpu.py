"""The parts of `make gpu` on a stand-in: their code runs, and what holds on every device holds here."""

import pytest


@pytest.fixture(scope="module")
def script(benchmark_script):
    on_gpu = benchmark_script("on_gpu")
    with on_gpu.stand_in_for("cpu", small=True):
        yield on_gpu


@pytest.mark.parametrize(
    ("part", "held"),
    [
        ("attention", 5), ("bits", 0), ("pressure", 2), ("captures", 1), ("copies", 1), ("8 billion parameters", 0),
        ("experts and windows", 0), ("decode", 0),
    ],
)  # fmt: skip
def test_a_part_holds_on_a_stand_in(script, part, held):
    found = script.PARTS[part].run()
    values = [value for _, value in found]
    assert sum(value.startswith("held") for value in values) == held
    assert not any("MISSED" in value for value in values)
    if part == "pressure":
        assert all(" 0 preemptions" not in value for value in values)


def test_a_part_that_fails_or_hangs_is_a_row_of_the_page(script, monkeypatch, tmp_path):
    part = script.PARTS["copies"]
    monkeypatch.setitem(script.PARTS, "copies", script.Part(part.run, 0, part.wanted))
    hung, _ = script.tried("copies", [])
    assert hung == [("copies", "FAILED: not done within 0 s")]
    (tmp_path / "fails.py").write_text("raise SystemExit('no device')")
    monkeypatch.setattr(script, "__file__", str(tmp_path / "fails.py"))
    assert script.tried("decode", [])[0] == [("decode", "FAILED: no device")]
    page = script.page({"copies": (hung, 1.0)}, "cpu")
    assert "| copies | FAILED: not done within 0 s |" in page
    assert "Wanted: half of a pinned copy's rate." in page


def test_without_cuda_it_says_what_would_run_here(script, monkeypatch):
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cpu --small"):
        script.main()

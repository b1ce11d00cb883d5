"""`paged capacity`: what fits, and configurations of one's own. The figures of models that ship are in fixtures/printed.txt."""

import re

import pytest

from paged.study.hardware import Roofline, capacity_of, device_named, model_named
from paged.study.hardware.device import Link

EXAMPLE = ("capacity", "llama-2-70b", "--dtype", "bf16", "--batch", 16, "--length", 1024)


def found(model, device="a100-80g", *, batch=16, length=1024, **options):
    place = Roofline(model=model_named(model), device=device_named(device), **options)
    return place, capacity_of(place, batch=batch, length=length)


def test_in_a_terminal_of_80_columns_nothing_is_cut(printed, terminal):
    screen = terminal(80, color_system=None)
    assert printed(*EXAMPLE) == ""
    drawn = screen.getvalue()
    assert "…" not in drawn and max(map(len, drawn.splitlines())) <= 80
    assert "42.9 GB" in " ".join(drawn.split())


def test_the_page_shows_what_the_command_prints(printed, repository):
    page = (repository / "docs" / "hardware.md").read_text()
    command, shown = re.search(r"^```\n\$ paged (.*?)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL).groups()
    assert printed(*command.split()) == shown


def test_the_page_s_own_model_is_one(document, repository, tmp_path):
    page = (repository / "docs" / "hardware.md").read_text()
    path = tmp_path / "mine.json"
    path.write_text(re.search(r"^```json\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL).group(1))
    assert document("capacity", path, "--device", "h100")["model"] == "mine"


@pytest.mark.parametrize(
    ("model", "device", "options"),
    [("llama-2-70b", "h100", {"tensor_parallel": 4}), ("smollm-135m", "cpu", {"dtype": "fp32"})],
)
def test_so_many_sequences_fit_and_one_more_does_not(model, device, options):
    place, figures = found(model, device, **options)
    assert figures.fits
    # More rows take more logits, so room is asked for with as many.
    most = found(model, device, batch=figures.max_sequences, **options)[1].max_sequences
    assert found(model, device, batch=most, **options)[1].fits
    assert not found(model, device, batch=figures.max_sequences + 1, **options)[1].fits
    assert figures.num_blocks == place.num_blocks(16, max_sequences=16)


def test_the_fewest_devices_do_and_half_of_them_do_not_and_one_that_works_alone_has_no_such_number():
    fewest = found("llama-3-70b", "a100-40g", batch=64)[1].fewest_devices
    assert found("llama-3-70b", "a100-40g", batch=64, tensor_parallel=fewest)[1].fits
    assert not found("llama-3-70b", "a100-40g", batch=64, tensor_parallel=fewest // 2)[1].fits
    assert found("deepseek-v2", "cpu", batch=4096, length=2048)[1].fewest_devices is None
    # A link that was named joins devices whose sheet has none, and does not count where one device does.
    link = Link(bytes_per_s=1e10, latency_s=1e-5)
    linked, figures = found("llama-2-13b", "rtx4090", batch=1, tensor_parallel=4, link=link)
    assert linked.device.interconnect is None and figures.fewest_devices == 2

"""`paged capacity`: what fits, and configurations of one's own. The figures of models that ship are in fixtures/printed.txt."""

import json
import re
import sys

import pytest

from paged.errors import MissingExtra
from paged.study.hardware import Roofline, capacity_of, device_named, layers_named, model_named

from .files_of_others import CONFIGS  # noqa: TID252

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
    [
        ("llama-2-70b", "h100", {"tensor_parallel": 4}),
        ("smollm-135m", "cpu", {"dtype": "fp32"}),
    ],
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


LFM2 = {
    "model_type": "lfm2", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 64, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"],
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    """Writes a configuration, and returns its path."""

    def write(config, name="config.json"):
        (tmp_path / name).write_text(json.dumps(config))
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    ("options", "element"),
    [
        (("--kv-dtype", "fp8"), 1),
        (("--dtype", "fp8"), 2),
        (("--dtype", "fp32"), 4),
    ],
)
def test_a_hybrid_s_own_configuration_has_pages_and_says_what_is_left_out(document, written, options, element):
    found = document("capacity", written(LFM2), *options)
    held = found["pages"]["bytes_of_a_sequence"]["8192"]
    # K and V of 2 heads of 16 of each token, and two tokens of 64 channels, which stay in bf16.
    assert held["kept"] == 8192 * 2 * 2 * 16 * element + 2 * 64 * 2
    assert held["kept"] <= held["held"] <= 1.03 * held["kept"]
    assert "weights, activations and steps" in found["not_modelled"][0]


def test_a_configuration_s_model_is_called_as_its_folder_or_its_file(document, written, tmp_path):
    assert document("capacity", written(LFM2))["model"] == tmp_path.name
    assert document("capacity", written(LFM2, "mine.json"))["model"] == "mine"


FALCON = {"model_type": "falcon", "n_layer": 3, "n_head": 8, "hidden_size": 64, "n_head_kv": 2}


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"model_type": "llama", "n_layers": 3, "n_heads": 4, "d_model": 64}, (3, 4 * 16)),
        ({**FALCON, "multi_query": True}, (3, 8)),
        ({**FALCON, "new_decoder_architecture": True}, (3, 2 * 8)),
    ],
)
def test_sizes_may_have_the_names_of_older_kinds_of_models(written, config, kept):
    (layers,) = layers_named(str(written(config))).layers
    assert (layers.count, layers.entry) == (kept[0], (2 * kept[1],) * 2)


LLAMA = CONFIGS["LLAMA"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "vocab_size": -5}, "field vocab_size: it is -5"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 32}, "llama is known without layers that keep a state"),
        ({**LFM2, "conv_L_cache": -3}, "conv_L_cache is -3"),
        ({**LLAMA, "model_type": "inkling_text"}, "inkling_text is not known"),
    ],
)
def test_a_wrong_field_is_refused_and_leaves_no_pages(refused, written, config, words):
    assert words in refused("capacity", written(config))


def test_without_transformers_a_hybrid_is_refused_and_a_llama_is_taken_to_keep_all_tokens(monkeypatch, written):
    monkeypatch.setitem(sys.modules, "transformers.models.auto.configuration_auto", None)
    with pytest.raises(MissingExtra, match="needs transformers, which is not installed"):
        layers_named(str(written(LFM2)))
    kept = layers_named(str(written(LLAMA)))
    assert (kept.layers[0].kind, kept.layers[0].count) == ("full", 32)
    assert "needs transformers" in kept.doubt

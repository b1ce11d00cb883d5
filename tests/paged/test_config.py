"""One configuration: what each setting takes, whence it comes, which of its sources wins, and what is said of what would not do."""

import os
import re

import msgspec
import numpy as np
import pytest
import typer

from paged import Costs, EngineConfig
from paged.cli.app import app
from paged.engine.config import fields_of
from paged.errors import InvalidConfig
from paged.serving.settings import Settings, read_settings

SETTINGS = fields_of(EngineConfig)
NAN = float("nan")


def flat(config):
    """The settings of a configuration, without their groups. docs/configuration.md, which is made of them, has their defaults."""
    return {name: getattr(getattr(config, its.group), name) for name, its in SETTINGS.items()}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for variable in [each for each in os.environ if each.startswith("PAGED_")]:
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("field", [*SETTINGS.values(), *fields_of(Settings).values()], ids=lambda field: field.name)
def test_what_a_setting_does_not_take_is_refused_with_its_name_and_what_would_do(field):
    kind = EngineConfig if field.group else Settings
    beyond = -1 if field.least == 0 else 0
    wrong = {
        int: ["16", True, np.True_, 2.0, NAN, beyond, "4G", *([] if field.most is None else [field.most + 1])],
        float: ["16", True, NAN, float("inf"), beyond],
        bool: ["no", 1, 0],
        str: [7, b"auto", *(["luck"] if field.choices else [])],
        tuple: ["a", [7]],
    }.get(field.kind, [])
    for value in [] if field.rule else wrong:
        got = f'"{value}"' if isinstance(value, str) else repr(value)
        with pytest.raises(InvalidConfig, match=rf"^{field.name} has to be .+; got {re.escape(got)}\.$"):
            kind().but(**{field.name: value})
    if field.is_optional:
        assert getattr(kind().but(**{field.name: None}), "port", 8000) == 8000
    elif not field.rule:
        with pytest.raises(InvalidConfig, match=rf"^{field.name} has to be .+; got None\.$"):
            kind().but(**{field.name: None})


def test_a_struct_is_checked_however_it_is_made():
    config = EngineConfig.of(num_blocks=np.int8(9), prefix_caching=np.False_, seed=np.uint64(2**64 - 1))
    found = (config.memory.num_blocks, config.memory.prefix_caching, config.decoding.seed)
    assert [*map(type, found)] == [int, bool, int]
    for made in (type(config.memory), config.but):
        with pytest.raises(InvalidConfig, match="block_size has to be"):
            made(block_size=0)
    assert EngineConfig.of(config, host_blocks=3) == config.but(host_blocks=3) != config
    assert EngineConfig.of(costs=Costs()).scheduling.costs == Costs()
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


ALIASES = [(its.name, other) for its in SETTINGS.values() for other in its.vllm if other != its.name]


@pytest.mark.parametrize(("ours", "vllms"), ALIASES)
def test_vllms_name_is_taken_by_python_the_environment_and_a_file(tmp_path, monkeypatch, ours, vllms):
    value = False if SETTINGS[ours].kind is bool else 3
    expected = EngineConfig.of(**{ours: value})
    assert EngineConfig.of(**{vllms: value}) == expected != EngineConfig()
    (tmp_path / "a.toml").write_text(f"[engine]\n{vllms} = {str(value).lower()}")
    assert EngineConfig.from_toml(tmp_path / "a.toml") == expected
    monkeypatch.setenv(f"PAGED_{vllms.upper()}", str(value))
    assert EngineConfig.from_environment() == expected


def test_arguments_win_over_the_environment_that_over_the_file_and_that_over_defaults(tmp_path, monkeypatch):
    path = tmp_path / "a.toml"
    path.write_text("[engine]\nblock_size = 4\nhost_blocks = 4\nmax_num_seqs = 4\n")
    monkeypatch.setenv("PAGED_HOST_BLOCKS", "3")
    monkeypatch.setenv("PAGED_MAX_SEQUENCES", "3")
    found = EngineConfig.from_toml(path, max_sequences=2)
    assert found == EngineConfig.of(block_size=4, host_blocks=3, max_sequences=2)
    assert EngineConfig.from_environment(host_blocks=2) == EngineConfig.of(host_blocks=2, max_sequences=3)
    assert read_settings(path, {}, {"max_sequences": 2}).engine == found.but(policy="paged-fair", remember_evicted=1000)
    assert EngineConfig.of() == EngineConfig()


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("PAGED_KV_CACHE_BYTES", "4G", "kv_cache_bytes", 2**32),
        ("PAGED_MAX_MODEL_LEN", "16k", "max_model_len", 16_000),
        ("PAGED_BATCH_INVARIANT", "no", "batch_invariant", False),
        ("PAGED_MODEL", "a/folder", "model", "a/folder"),
        ("PAGED_SERVICE_PORT", "8000", "seed", 0),
    ],
)
def test_a_variable_is_read_as_an_option_is(monkeypatch, variable, text, name, value):
    monkeypatch.setenv(variable, text)
    assert EngineConfig.from_environment() == EngineConfig.of(**{name: value})


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("PAGED_BLOCK_SIZE", "0", ": block_size has to be an integer of at least 1; got 0."),
        ("PAGED_BLOCK_SIZE", "", ': block_size has to be an integer of at least 1; got "".'),
        ("PAGED_BLOCK_SIZE", "4x", ': block_size has to be an integer of at least 1; got "4x". Text may'),
        ("PAGED_BLOCK_SIZE", "9" * 5000, ": block_size has to be an integer of at least 1; got '999"),
        ("PAGED_HOST_CACHING", "on", ': host_caching has to be True or False; got "on".'),
        ("PAGED_BLOCKSIZE", "8", " names no setting. Did you mean PAGED_BLOCK_SIZE?"),
    ],
)
def test_a_variable_that_would_not_do_is_named(monkeypatch, variable, text, said):
    monkeypatch.setenv(variable, text)
    with pytest.raises(InvalidConfig, match=f"^{re.escape(variable + said)}"):
        EngineConfig.from_environment()


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_each_setting_is_an_option_with_its_help_default_range_and_vllms_names(command):
    options = {option.name: option for option in typer.main.get_command(app).commands[command].params}
    fields = {**SETTINGS, **(fields_of(Settings) if command == "serve" else {})}
    tables = {"tenants", "tenant_weights"}
    assert not tables & set(options) and set(fields) - tables <= set(options)
    engine = Settings().engine if command == "serve" else EngineConfig()
    # What these are on a command of their own: the model is its argument, the seed one of a request.
    its_own = {"serve": {"model"}, "generate": {"seed"}, "chat": {"seed"}}[command]
    for name in set(fields) - tables - its_own:
        field, option = fields[name], options[name]
        names = {each.partition("/")[0] for each in option.opts}
        assert {f"--{each.replace('_', '-')}" for each in field.vllm} <= names
        assert option.help.startswith(field.help)
        assert not (field.limits or field.choices) or option.help[len(field.help) + 2 :] == f"{field.takes[1:]}."
        assert option.show_default == field.shown(getattr(getattr(engine, field.group, Settings()), name))


@pytest.mark.parametrize("field", SETTINGS.values(), ids=lambda field: field.name)
def test_a_file_has_the_same_names_defaults_and_ranges(tmp_path, field):
    default, path = flat(EngineConfig())[field.name], tmp_path / "a.toml"
    if default not in (None, ()):
        path.write_text(f"[engine]\n{field.name} = {msgspec.json.encode(default).decode()}\n")
        assert EngineConfig.from_toml(path) == EngineConfig()
    if field.limits:
        path.write_text(f"[engine]\n{field.name} = {-1 if field.least == 0 else 0}\n")
        with pytest.raises(InvalidConfig, match=re.escape(f"{path}: {field.name} has to be {field.takes}; got")):
            EngineConfig.from_toml(path)


def test_speed_on_a_gpu_and_answers_apart_on_a_cpu_are_what_nothing_named_means():
    for device, is_invariant, budget in (("cpu", True, 256), ("cuda", False, 2048)):
        assert EngineConfig().model.is_invariant_on(device) is is_invariant
        assert EngineConfig().scheduling.budget_on(device) == budget
        named = EngineConfig.of(batch_invariant=not is_invariant, max_tokens_per_step=7)
        assert (named.model.is_invariant_on(device), named.scheduling.budget_on(device)) == (not is_invariant, 7)

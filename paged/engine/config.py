"""The configuration of an engine: one struct, made from Python, a command line, the environment or a file.

    arguments  >  PAGED_… of the environment  >  [engine] of a TOML file  >  defaults

Each field is declared once, with its rule and its help; keywords, options, variables and keys of a file are made from
that. Their names are flat, ours or vLLM's. The struct has them in groups, so that each reader takes a small one.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from paged.attention.kv_dtypes import AUTO, CODE_BITS, KV_DTYPES, SKIPPED
from paged.base.arguments import is_integer, is_real
from paged.base.words import shown
from paged.engine.vllm_flags import why_not
from paged.errors import InvalidConfig
from paged.model.quantised.names import QUANTIZATIONS, check_asked
from paged.scheduler import Costs

PREFIX = "PAGED_"
DISK_CACHE_GB = 10.0
"""Size limit of a disk cache by default, in units of 1,000,000,000 bytes."""
_FLOATS = ("float32", "bfloat16", "float16")
_UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZES = "Text may have k, m, g or t behind it for powers of 1,000, or K, M, G or T for powers of 1,024."
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
# By kind: its values in words, and a function from a given value to the one to keep (None: refused).
_KINDS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    int: ("an integer", lambda value: int(value) if is_integer(value) else None),
    float: (
        "a finite number of seconds",
        lambda value: float(value) if is_real(value) and abs(value) < math.inf else None,
    ),
    bool: ("True or False", lambda value: bool(value) if isinstance(value, (bool, np.bool_)) else None),
    str: ("text", lambda value: value if isinstance(value, str) else None),
    tuple: (
        "a list of texts",
        lambda value: (
            tuple(value) if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value) else None
        ),
    ),
    Any: ("", lambda value: value),
}


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of a setting, without its default. The annotation has the first lines, and `fields_of` adds the
    last one.

    help         a sentence
    when         a sentence: when to change it
    usually      the meaning of a default of None, in words
    least, most  the smallest and the largest number; a float has to be larger than `above`
    choices      of text
    rule, what   instead of these: a function from a value to the one to keep (None: refused), and accepted values in
                 words
    vllm         vLLM's names for it
    flag         its option, if not the name; "" for none. `letter`: a short one; `turns_off`: one that turns it off
    variable     an environment variable, besides PAGED_… for an engine's setting
    metavar      the word for a value in the help, and the `panel` there
    name, kind, is_optional, group
                 kind: int, float, bool, str, tuple or Any; group: the field that holds it, "" for none
    """

    help: str
    when: str = ""
    usually: str = "none"
    least: int | None = None
    most: int | None = None
    above: int | None = None
    choices: tuple[str, ...] = ()
    rule: Callable[[Any], Any] | None = None
    what: str = ""
    vllm: tuple[str, ...] = ()
    flag: str | None = None
    letter: str | None = None
    turns_off: str | None = None
    variable: str | None = None
    metavar: str | None = None
    panel: str = ""
    name: str = ""
    kind: Any = None
    is_optional: bool = False
    group: str = ""

    def checked(self, value: Any) -> Any:
        """Return the value as Python's own kind. Raises InvalidConfig with name, value, and what the setting takes."""
        if value is None and self.is_optional:
            return None
        found = (self.rule or _KINDS[self.kind][1])(value)
        if (
            found is None
            or (self.least is not None and found < self.least)
            or (self.most is not None and found > self.most)
            or (self.above is not None and found <= self.above)
            or (self.choices and found not in self.choices)
        ):
            raise self._wrong(value)
        return found

    def _wrong(self, value: Any, more: str = "") -> InvalidConfig:
        got = f'"{value}"' if isinstance(value, str) and len(value) < 80 else shown(value)
        return InvalidConfig(f"{self.name} has to be {self.takes}; got {got}.{more}")

    def parsed(self, text: str) -> Any:
        """Return the value of a text, or a text that `checked` refuses. Raises InvalidConfig for a wrong number."""
        if self.kind is int:
            found = re.fullmatch(r"(-?\d{1,40})([kKmMgGtT]?)", text.strip())
            if found is None:
                raise self._wrong(text, f" {_SIZES}" if text[:1].isdigit() else "")
            return int(found[1]) * _UNITS.get(found[2], 1)
        if self.kind is float:
            with suppress(ValueError):
                return float(text)
        return _FLAGS.get(text.lower(), text) if self.kind is bool else text

    @property
    def names(self) -> tuple[str, ...]:
        """Our name, and vLLM's if they differ."""
        return tuple(dict.fromkeys((self.name, *self.vllm)))

    @property
    def takes(self) -> str:
        """Accepted values in words: "an integer of at least 1". Messages, help and docs/configuration.md use them."""
        if self.choices:
            return f'"{", ".join(self.choices[:-1])}" or "{self.choices[-1]}"'.replace(", ", '", "')
        return (self.what or _KINDS[self.kind][0]) + self.limits

    @property
    def limits(self) -> str:
        """The range of a number, "" without one."""
        if self.most is not None:
            return f" from {self.least} to {self.most if self.most != 2**64 - 1 else '2^64 - 1'}"
        if self.least is not None:
            return f" of at least {self.least}"
        return "" if self.above is None else f" above {self.above}"

    @property
    def options(self) -> tuple[str, ...]:
        """The options on a command line, without the letter; --on/--off for a flag, () for a setting without one."""
        if self.flag == "":
            return ()
        spelled = [self.flag or f"--{self.name}", *(f"--{name}" for name in self.vllm)]
        names = [*dict.fromkeys(name.replace("_", "-") for name in spelled)]
        if self.kind is bool:
            names = [f"{name}/{self.turns_off or name.replace('--', '--no-')}" for name in names]
        return tuple(names)

    def shown(self, default: Any) -> str:
        """Return a default as help and docs/configuration.md show it."""
        if default in (None, "", ()):
            return self.usually
        if isinstance(default, bool):
            return "yes" if default else "no"
        return f"{default:,}" if isinstance(default, int) and self.name != "port" else f"{default}"


@cache
def fields_of(kind: type[msgspec.Struct]) -> dict[str, Field]:
    """Return the settings of a struct and of its groups, by name."""
    found: dict[str, Field] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is Annotated:
            its, field = get_args(hint)[:2]
            kinds = get_args(its) if get_origin(its) in (UnionType, Union) else (its,)
            plain = next(get_origin(each) or each for each in kinds if each is not NoneType)
            found[name] = msgspec.structs.replace(field, name=name, kind=plain, is_optional=NoneType in kinds)
        elif isinstance(hint, type) and issubclass(hint, Config) and hint.title:
            its_own = fields_of(hint).values()
            found |= {each.name: msgspec.structs.replace(each, group=name, panel=hint.title) for each in its_own}
    return found


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that are checked when they are made. Raises InvalidConfig with the field, its value, and what it takes."""

    # The owner of the settings, for messages; the title of a group of options.
    of_what: ClassVar[str] = ""
    title: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, setting in fields_of(type(self)).items():
            if not setting.group:
                msgspec.structs.force_setattr(self, name, setting.checked(getattr(self, name)))

    def layered(self, *layers: tuple[str, Mapping[str, Any]]) -> Self:
        """Return a copy with the values of these layers, by our names or vLLM's. A later layer wins. Raises
        InvalidConfig, which begins with the layer's name; for an unknown setting it names the nearest one."""
        names = {name: field for field in fields_of(type(self)).values() for name in field.names}
        groups: dict[str, dict[str, Any]] = {"": {}}
        for where, values in layers:
            seen: dict[str, str] = {}
            for name, value in values.items():
                try:
                    if name not in names:
                        raise InvalidConfig(why_not(name, [*names], self.of_what))
                    field = names[name]
                    if (twin := seen.setdefault(field.name, name)) != name:
                        raise InvalidConfig(f"{twin} and {name} are the same; name one.")
                    groups.setdefault(field.group, {})[field.name] = field.checked(value)
                except InvalidConfig as error:
                    raise InvalidConfig(f"{where}: {error}" if where else f"{error}") from None
        own = groups.pop("")
        changed = {group: msgspec.structs.replace(getattr(self, group), **its) for group, its in groups.items()}
        return msgspec.structs.replace(self, **changed, **own)

    def but(self, **values: Any) -> Self:
        """Return a copy with other values, by our names or vLLM's."""
        return self.layered(("", values))


def _model(value: Any) -> Any:
    return None if isinstance(value, str) and not value else value


def _folder(value: Any) -> Any:
    return str(value) if isinstance(value, (str, Path)) and str(value) else None


def _costs(value: Any) -> Any:
    return value if isinstance(value, Costs) or (isinstance(value, str) and value == "measured") else None


def _kv_dtype(value: Any) -> Any:
    """Accept vLLM's spelling of the same kind, too. Raises InvalidConfig for 8-bit floats, which no backend reads."""
    if not isinstance(value, str):
        return None
    if value.startswith("fp8"):
        raise InvalidConfig(
            f'kv_cache_dtype="{value}": no backend here reads floats of 8 bits; "int8" has as many, with a scale a token and head.'
        )
    name = value.removesuffix("_per_token_head")
    return name if name in CODE_BITS else value


def _skipped(value: Any) -> Any:
    """Return names and numbers of layers from a list, or from a text with commas; None if one is unknown."""
    listed = [value] if isinstance(value, (str, int)) else value
    if isinstance(listed, bool) or not isinstance(listed, (list, tuple)):
        return None
    found = [part.strip() for each in listed for part in str(each).split(",")]
    return tuple(dict.fromkeys(found)) if all(each.isdecimal() or each in SKIPPED for each in found) else None


# fmt: off
class ModelConfig(Config, frozen=True, kw_only=True):
    """The model, and how it is computed. `model` may be a LoadedModel, too."""

    title: ClassVar[str] = "The model"

    model: Annotated[Any | None, Field(help="A checkpoint folder in the Hugging Face layout, or a small model that ships: embedded or hybrid.", when="To run a model of your own.", usually="embedded", letter="-m", metavar="FOLDER", rule=_model, what="a checkpoint folder or a LoadedModel", vllm=("model",))] = None
    backend: Annotated[str, Field(help="How attention is computed; `paged doctor` lists what works here. auto: the fastest.", when="To compare backends, or to look for a fault in one.")] = "auto"
    batch_invariant: Annotated[bool | None, Field(help="An answer depends on nothing but its request; fast: words may differ with what else runs.", when="Turn it off for speed, where an answer may depend on the batch.", usually="on a CPU yes, on a GPU no", turns_off="--fast")] = None
    dtype: Annotated[str, Field(help="auto (on a CPU float32), float32, bfloat16 or float16.", when="bfloat16 or float16 halve the memory of float32.", vllm=("dtype",))] = "auto"
    quantization: Annotated[str | None, Field(help="Linear layers and experts as codes, made at load, on a CPU. int8: 8 bits and a scale a result; int4: 4 bits and a scale a group of 32 inputs. A draft model stays as it is.", when="When weights are too large, or decoding on a CPU is too slow. Answers change a little.", letter="-q", choices=QUANTIZATIONS, vllm=("quantization",))] = None
    quantize_head: Annotated[bool, Field(help="Beside a quantization the output projection as int8, too, and an embedding that shares its weights, unless it scales them.", when="When the vocabulary is large beside the model.")] = False
    device: Annotated[str, Field(help="cpu, or cuda.", when="To compute on a GPU.")] = "cpu"
    enforce_eager: Annotated[bool, Field(help="On a GPU, launch each kernel from Python, and capture no pass as a CUDA graph.", when="To look for a fault, or for the memory of the graphs; decoding is slower.", vllm=("enforce_eager",))] = False
    tensor_parallel_size: Annotated[int, Field(help="Processes that the model is split over, its ranks: each has a part of the weights and of the KV heads, on a GPU or cores of its own. Llama, Mistral, Qwen 2 and 3 and Gemma, of floats.", when="When one process cannot hold the model, or cores or GPUs are idle.", least=1, letter="-tp", vllm=("tensor_parallel_size",))] = 1
    max_model_len: Annotated[int | None, Field(help="Tokens of a sequence, its prompt and its answer.", when="To refuse longer requests.", usually="what model and memory allow", least=1, vllm=("max_model_len",))] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_asked(self.quantization, with_head=self.quantize_head)
        if self.tensor_parallel_size > 1 and self.quantization is not None:
            raise InvalidConfig(
                f'tensor_parallel_size={self.tensor_parallel_size} splits weights that are floats; quantization="{self.quantization}" goes with 1.'
            )

    def is_invariant_on(self, device: str) -> bool:
        """Whether answers depend on nothing but their requests on this type of device, "cpu" or another."""
        return device == "cpu" if self.batch_invariant is None else self.batch_invariant


class MemoryConfig(Config, frozen=True, kw_only=True):
    """The pools of blocks."""

    title: ClassVar[str] = "Memory"

    num_blocks: Annotated[int | None, Field(help="Device blocks; pages where layers are of several kinds.", when="When the number has to be exact, as in a test.", usually="what --kv-cache-bytes hold", least=1, flag="--blocks", vllm=("num_gpu_blocks_override",))] = None
    kv_cache_bytes: Annotated[int | None, Field(help="Device memory of K and V: 4G is 4 GiB.", when="First of all: the more it is, the more sequences run side by side.", usually="256 MiB, or what all sequences need", least=0, vllm=("kv_cache_memory_bytes",))] = None
    kv_cache_dtype: Annotated[str, Field(help="How K and V are stored. auto: in the model's dtype; int8, int4: in so many bits, with a scale a token and head; a dtype of floats has to be the model's. States, latents, index keys and compressed entries stay in the model's.", when="When memory is short, and answers may change a little.", choices=(*KV_DTYPES, *_FLOATS), rule=_kv_dtype, vllm=("kv_cache_dtype",))] = AUTO
    kv_cache_dtype_skip_layers: Annotated[tuple[str, ...], Field(help="Layers whose K and V stay in the model's dtype beside others in int8 or int4: sliding_window, chunk, or numbers of layers.", when="When fewer bits in all layers change answers too much.", rule=_skipped, what='"sliding_window", "chunk" or numbers of layers', metavar="LAYERS", vllm=("kv_cache_dtype_skip_layers",))] = ()
    block_size: Annotated[int | None, Field(help="Tokens a block: whole entries, where a model keeps an entry of several tokens.", when="Smaller: less memory is lost in last blocks, and more of a prefix is shared. Larger: shorter tables.", usually="16; 128 where a model has entries of 128", least=1, vllm=("block_size",))] = None
    host_blocks: Annotated[int, Field(help="Host blocks to swap to; pages where layers are of several kinds.", when="When requests are preempted, and the host has memory to spare.", least=0)] = 0
    prefix_caching: Annotated[bool, Field(help="Share equal full blocks.", when="Turn it off to measure without hits.", vllm=("enable_prefix_caching",))] = True
    host_caching: Annotated[bool, Field(help="Keep evicted blocks in host blocks; a hit brings them back.", when="When prefixes return after they left the device. It needs host_blocks.")] = False
    max_pinned: Annotated[int, Field(help="Blocks of content that hints may pin, pages where layers are of several kinds; never evicted, and requests have so many fewer.", when="When prompts have to stay whatever comes: a system prompt, a session.", least=0)] = 0
    max_pinned_per_tenant: Annotated[int | None, Field(help="Blocks of content that hints of one tenant may pin.", when="When tenants share the blocks that may be pinned.", usually="all of --max-pinned", least=0)] = None
    max_cached_per_tenant: Annotated[int | None, Field(help="Blocks that each tenant's finished requests may leave in the cache; what is over goes first.", when="When one tenant's prompts push out those of others.", usually="no limit", least=0)] = None
    remember_evicted: Annotated[int, Field(help="Evictions that are remembered, to explain why a prompt is not in the cache.", when="To learn why prefixes that were computed are missing.", least=0)] = 0
    disk_cache: Annotated[str | None, Field(help="A folder that keeps full blocks, also after the process has ended (docs/tiers.md).", when="When prefixes return after a restart.", metavar="FOLDER", rule=_folder, what="a folder")] = None
    disk_cache_gb: Annotated[float | None, Field(help="The most that the disk cache holds, in units of 1,000,000,000 bytes.", when="When the disk has less to spare, or more.", usually="10", above=0, metavar="GB", what="a finite number")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise InvalidConfig("num_blocks and kv_cache_bytes say the same thing twice; name one.")
        if self.max_pinned_per_tenant is not None and self.max_pinned_per_tenant > self.max_pinned:
            raise InvalidConfig(
                f"max_pinned_per_tenant is a part of max_pinned; got {self.max_pinned_per_tenant} of {self.max_pinned}."
            )
        if (self.max_pinned or self.max_cached_per_tenant is not None) and not self.prefix_caching:
            name = "max_pinned" if self.max_pinned else "max_cached_per_tenant"
            raise InvalidConfig(f"{name} is of what the prefix cache keeps; got {name}={getattr(self, name)} and prefix_caching=False.")
        if self.disk_cache is None and self.disk_cache_gb is not None:
            raise InvalidConfig(f"disk_cache_gb goes with disk_cache; got disk_cache_gb={self.disk_cache_gb} and disk_cache=None.")
        if self.disk_cache is not None and not self.prefix_caching:
            raise InvalidConfig("disk_cache keeps what the prefix cache keeps; got prefix_caching=False.")
        if self.kv_cache_dtype_skip_layers and self.kv_cache_dtype not in CODE_BITS:
            raise InvalidConfig(
                f'kv_cache_dtype_skip_layers goes with a kv_cache_dtype of "int8" or "int4"; got "{self.kv_cache_dtype}".'
            )


class SchedulingConfig(Config, frozen=True, kw_only=True):
    """The limits of a step, and the policy."""

    title: ClassVar[str] = "Scheduling"

    policy: Annotated[Any, Field(help="The policy that decides which requests run; `paged policies` lists them.", when="When requests have deadlines or tenants, or to compare.", metavar="NAME", what="a policy's name, or a Policy")] = "paged"
    tenant_weights: Annotated[Any | None, Field(help="Shares of tenants by name, under a policy that is fair between them; of those not named: 1.", when="When tenants are to get unequal shares.", flag="", what="weights above 0 by tenant")] = None
    max_tokens_per_step: Annotated[int | None, Field(help="Token budget of a step.", when="Larger: prompts are computed sooner. Smaller: shorter steps, so that running answers do not stall.", usually="on a CPU 256, on a GPU 2,048", least=1, vllm=("max_num_batched_tokens",))] = None
    max_sequences: Annotated[int, Field(help="Sequences in a step.", when="Larger: more tokens a second in all. Smaller: each answer is faster.", least=1, vllm=("max_num_seqs",))] = 32
    max_chunk: Annotated[int | None, Field(help="Prompt tokens of one sequence in a step.", when="When one long prompt keeps others from their first tokens.", usually="what the step has room for", least=1)] = None
    costs: Annotated[Any | None, Field(help="What copying and computing cost; measured: timed here, at the start.", when="When copies are faster or slower on your machine beside computing.", usually="built-in figures", metavar="measured", rule=_costs, what='a Costs, or "measured"')] = None
    steps_ahead: Annotated[int, Field(help="1: the model has a thread of its own and a step is launched before the last one has ended; answers come a step later.", when="When the time between steps counts and cores are to spare; measure both: on a GPU 1 was no faster (docs/performance.md).", least=0, most=1)] = 0
    max_retries: Annotated[int, Field(help="Tries of a step that runs out of memory, after the first, before its requests end with an error.", when="0 to see the first failure.", least=0)] = 2

    def budget_on(self, device: str) -> int:
        """Return the token budget of a step on this type of device, "cpu" or another."""
        return self.max_tokens_per_step or (256 if device == "cpu" else 2048)


class DecodingConfig(Config, frozen=True, kw_only=True):
    """How tokens are sampled and drafted."""

    title: ClassVar[str] = "Sampling and drafts"

    seed: Annotated[int, Field(help="Seed of requests that name none; their ids go into it.", when="To draw other answers.", least=0, most=2**64 - 1, vllm=("seed",))] = 0
    speculate: Annotated[str | None, Field(help="Draft tokens; answers are the same, in fewer steps. lookup: from the text itself; lookahead: from guesses that came true; draft: by a smaller model.", when="When few sequences run at a time, or answers repeat their prompts.", usually="no drafts", choices=("lookup", "lookahead", "draft"))] = None
    num_drafts: Annotated[int | None, Field(help="Drafts of a sequence and step at most; lookahead needs 6 or more.", when="Fewer when many drafts are wrong, more when most are right.", usually="6, for lookahead 12", least=1)] = None
    draft_model: Annotated[Any | None, Field(help="A smaller checkpoint of the same tokens, for --speculate draft; its K and V lie in the same blocks.", when="When the target model is one of your own.", usually="the one that ships", metavar="FOLDER", rule=_model, what="a checkpoint folder or a LoadedModel")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_model is not None and self.speculate != "draft":
            raise InvalidConfig(f'a draft_model goes with speculate="draft"; got speculate={self.speculate!r}.')
        if self.num_drafts is not None and self.speculate is None:
            raise InvalidConfig(f"num_drafts goes with speculate; got num_drafts={self.num_drafts} and speculate=None.")
        if self.speculate == "lookahead" and self.most_drafts < 6:
            raise InvalidConfig(f'num_drafts has to be at least 6 with speculate="lookahead": 3 of a run and 3 of a chain; got {self.num_drafts}.')

    @property
    def most_drafts(self) -> int:
        """Drafts of a row and step, at most, if drafts are made."""
        return self.num_drafts or (12 if self.speculate == "lookahead" else 6)


# fmt: on
class EngineConfig(Config, frozen=True, kw_only=True):
    """The configuration of an engine. `EngineConfig.of(num_blocks=64, max_num_seqs=8)` puts each name into its group."""

    of_what: ClassVar[str] = "an engine"

    model: ModelConfig = ModelConfig()
    memory: MemoryConfig = MemoryConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    decoding: DecodingConfig = DecodingConfig()

    def __post_init__(self) -> None:
        for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            if not isinstance(group := getattr(self, name), type(default)):
                raise InvalidConfig(
                    f"{name} has to be a {type(default).__name__}; got {shown(group)}. EngineConfig.of takes a setting by its own name."
                )
        if self.decoding.speculate == "draft" and self.memory.disk_cache is not None:
            raise InvalidConfig(
                'disk_cache does not go with speculate="draft": K and V of a draft model are not kept there.'
            )
        if self.decoding.speculate is not None and self.scheduling.steps_ahead:
            raise InvalidConfig(
                "speculate does not go with steps_ahead: how many drafts are right decides where the next step goes on."
            )
        if self.model.tensor_parallel_size > 1 and self.memory.disk_cache is not None:
            raise InvalidConfig(
                f"disk_cache does not go with tensor_parallel_size={self.model.tensor_parallel_size}: each rank has a part of a block."
            )
        if self.model.tensor_parallel_size > 1 and self.scheduling.costs == "measured":
            raise InvalidConfig(
                f'costs="measured" times one process; with tensor_parallel_size={self.model.tensor_parallel_size} name a Costs.'
            )

    @classmethod
    def of(cls, model: Any = None, **options: Any) -> EngineConfig:
        """Return the given configuration, or that of a model, with these settings."""
        return model.but(**options) if isinstance(model, cls) else cls().but(model=model, **options)

    @classmethod
    def from_toml(cls, path: str | Path, **options: Any) -> EngineConfig:
        """Read [engine] of a file, as `paged serve --config`. The environment wins over it, and `options` over both.
        Raises InvalidConfig, which names the file, and OSError if it cannot be read."""
        return cls().layered((f"{path}", engine_table(path, read_toml(path))), ("", environment()), ("", options))

    @classmethod
    def from_environment(cls, **options: Any) -> EngineConfig:
        """Read the variables PAGED_… that name settings; `options` win over them."""
        return cls().layered(("", environment()), ("", options))


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file. Raises InvalidConfig, which names it, and OSError."""
    try:
        return tomllib.loads(Path(path).read_bytes().decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: {error}") from None


def engine_table(path: object, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table [engine] of a file. Raises InvalidConfig if it is no table, or settings stand outside it."""
    for name in document:
        if name in fields_of(EngineConfig):
            raise InvalidConfig(f"{path}: {name} is a setting of an engine; it stands under [engine].")
    table = document.get("engine", {})
    if not isinstance(table, dict):
        raise InvalidConfig(f"{path}: engine has to be a table.")
    return table


def environment() -> dict[str, Any]:
    """Read an engine's settings from variables: PAGED_BLOCK_SIZE is block_size. Raises InvalidConfig, which names the
    variable, for a wrong value, and for a name that is nearly a setting's. Other names with PAGED_ are ignored: they
    may belong to other programs."""
    names = {name: field for field in fields_of(EngineConfig).values() for name in field.names}
    found: dict[str, Any] = {}
    for variable, text in sorted(os.environ.items()):
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX):
            continue
        if name in names:
            try:
                found[name] = names[name].checked(names[name].parsed(text))
            except InvalidConfig as error:
                raise InvalidConfig(f"{variable}: {error}") from None
        elif near := get_close_matches(name, names, n=1, cutoff=0.85):
            raise InvalidConfig(f"{variable} names no setting. Did you mean {PREFIX}{near[0].upper()}?")
    return found

"""`paged generate`: prompts in, text out, on the model that ships or any checkpoint folder."""

import math
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer import Option

from paged import BeamSearchParams, ContrastiveSearchParams, SamplingParams, StructuredOutputsParams
from paged.base.words import counted
from paged.cli.commands import takes, with_options_of
from paged.cli.options import Json
from paged.cli.show import console, counting, loading, print_json, printed, say, table
from paged.engine.config import EngineConfig
from paged.errors import InvalidSampling, NoPrompt

if TYPE_CHECKING:
    from paged.engine.engine import Engine
    from paged.engine.results import Completion, CompletionOutput, EngineOutput, EngineStats

_PROMPTS, _SAMPLING = "Prompts", "How tokens are chosen"


SOME_FAILED = 1
_EARLY = {"true": True, "false": False}


# fmt: off
class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What to continue, and how: the command's options. Those of sampling have the names of its parameters."""

    prompt: Annotated[list[str] | None, Option("--prompt", "-p", help="A prompt; may be given several times.", rich_help_panel=_PROMPTS)] = None
    file: Annotated[str | None, Option("--file", "-f", help="A file with a prompt a line (UTF-8); - is standard input.", rich_help_panel=_PROMPTS)] = None
    max_tokens: Annotated[int, Option(help="Output tokens at most.", rich_help_panel=_SAMPLING)] = 64
    temperature: Annotated[float, Option(help="Sampling temperature; 0 is greedy.", rich_help_panel=_SAMPLING)] = 0.0
    top_k: Annotated[int | None, Option(help="Sample from this many of the likeliest tokens.", show_default="all", rich_help_panel=_SAMPLING)] = None
    top_p: Annotated[float | None, Option(help="Sample from the likeliest tokens that make up this share.", show_default="all", rich_help_panel=_SAMPLING)] = None
    min_p: Annotated[float | None, Option(help="Sample from tokens at least this many times as likely as the likeliest.", show_default="all", rich_help_panel=_SAMPLING)] = None
    typical_p: Annotated[float | None, Option(help="Sample from the most typical tokens that make up this share.", show_default="all", rich_help_panel=_SAMPLING)] = None
    seed: Annotated[int | None, Option(help="Seed of each request's sampling.", show_default="one of each request's number", rich_help_panel=_SAMPLING)] = None
    n: Annotated[int, Option("--n", help="Answers to each prompt; they share its memory.", rich_help_panel=_SAMPLING)] = 1
    best_of: Annotated[int | None, Option(help="Make this many answers, and show the --n likeliest.", show_default="--n", rich_help_panel=_SAMPLING)] = None
    beam_width: Annotated[int | None, Option(help="Search for the likeliest answers with this many sequences at a time.", show_default="no search", rich_help_panel=_SAMPLING)] = None
    length_penalty: Annotated[float | None, Option(help="For a beam search: above 0 favours long answers, below 0 short ones.", show_default="1", rich_help_panel=_SAMPLING)] = None
    num_beam_groups: Annotated[int | None, Option("--beam-groups", help="For a beam search: groups of sequences that avoid each other's tokens.", show_default="1", rich_help_panel=_SAMPLING)] = None
    diversity_penalty: Annotated[float | None, Option("--diversity-penalty", help="For beam groups: the penalty of a token for each other group that has it.", show_default="0", rich_help_panel=_SAMPLING)] = None
    early_stopping: Annotated[str | None, Option(help="For a beam search: true ends it with as many answers as beams, false when no better one is likely, never when none is possible.", show_default="false", rich_help_panel=_SAMPLING)] = None
    contrastive: Annotated[bool, Option("--contrastive", help="Take the candidate, of --top-k (4), that is least like the text so far.", rich_help_panel=_SAMPLING)] = False
    penalty_alpha: Annotated[float | None, Option(help="For a contrastive search: the weight of likeness against the probability.", show_default="0.6", rich_help_panel=_SAMPLING)] = None
    json_schema: Annotated[Path | None, Option("--json-schema", help="A file with a JSON schema that answers have to follow.", show_default="none", rich_help_panel=_SAMPLING)] = None
    json_object: Annotated[bool, Option("--json-object", help="Answers are JSON objects.", rich_help_panel=_SAMPLING)] = False
    grammar: Annotated[Path | None, Option("--grammar", help="A file with a grammar, in Lark's syntax, that answers have to follow.", show_default="none", rich_help_panel=_SAMPLING)] = None
    regex: Annotated[str | None, Option(help="A regular expression of the whole answer.", show_default="none", rich_help_panel=_SAMPLING)] = None
    choice: Annotated[list[str] | None, Option("--choice", help="One of the allowed answers; may be given several times.", rich_help_panel=_SAMPLING)] = None
    repetition_penalty: Annotated[float, Option("--repetition-penalty", help="Makes tokens of the prompt and the answer less likely by this factor; 1 is off.", rich_help_panel=_SAMPLING)] = 1.0
    presence_penalty: Annotated[float, Option("--presence-penalty", help="Subtracted from the logits of tokens in the answer.", rich_help_panel=_SAMPLING)] = 0.0
    frequency_penalty: Annotated[float, Option("--frequency-penalty", help="The same, for each time that a token occurred.", rich_help_panel=_SAMPLING)] = 0.0
    no_repeat_ngram_size: Annotated[int, Option("--no-repeat-ngram-size", help="No run of this many tokens occurs twice; 0 is off.", rich_help_panel=_SAMPLING)] = 0
    logit_bias: Annotated[list[str] | None, Option("--logit-bias", help="ID=NUMBER, added to the logit of a token id; may be given several times.", rich_help_panel=_SAMPLING)] = None
    allowed_token_ids: Annotated[list[int] | None, Option("--allowed-token-id", help="A token id that is allowed, and no others; may be given several times.", rich_help_panel=_SAMPLING)] = None
    bad_words: Annotated[list[str] | None, Option("--bad-word", help="A text that answers do not have; may be given several times.", rich_help_panel=_SAMPLING)] = None
    stop: Annotated[list[str] | None, Option("--stop", help="Text before which an answer ends; may be given several times.", rich_help_panel=_SAMPLING)] = None
    include_stop_str_in_output: Annotated[bool, Option("--include-stop", help="Keep the stop string at the end of a text.", rich_help_panel=_SAMPLING)] = False
    stop_token_ids: Annotated[list[int] | None, Option("--stop-token-id", help="A token id that ends an answer; may be given several times.", rich_help_panel=_SAMPLING)] = None
    min_tokens: Annotated[int, Option(help="The least tokens of an answer.", rich_help_panel=_SAMPLING)] = 0
    logprobs: Annotated[int | None, Option(help="Show log-probabilities of tokens, and of this many alternatives.", show_default="none", rich_help_panel=_SAMPLING)] = None
    prompt_logprobs: Annotated[int | None, Option(help="With --json: log-probabilities of the prompt's tokens, and of this many alternatives.", show_default="none", rich_help_panel=_SAMPLING)] = None
    echo: Annotated[bool, Option("--echo", help="With --json: begin each text with its prompt.", rich_help_panel=_SAMPLING)] = False
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on to the full length.", rich_help_panel=_SAMPLING)] = False
# fmt: on


@takes(engine=EngineConfig())
@with_options_of(Asked)
def generate(asked: Asked, json: Json = False, *, engine: dict[str, Any]) -> None:
    """Continue prompts with a language model whose KV lives in paged memory.

    Prompts come from --prompt, --file, or standard input, a line each. A single answer is written as it comes; many are shown when all are done.
    The same call gives the same text: an answer depends on nothing but its prompt and its sampling values, unless --fast is given.
    Status 1 if a request failed.

    Example: `paged generate --prompt "The with statement is used to" --max-tokens 40`
    """
    prompts, search = _prompts(asked.prompt, asked.file), _search(asked)
    given = _of(SamplingParams, asked) | _named(logit_bias=_biases(asked.logit_bias))
    if search is not None:
        # It has its own fields for them.
        for name in ("stop_token_ids", "n" if asked.beam_width is not None else "top_k"):
            given.pop(name, None)
    params = SamplingParams(**given, structured_outputs=_form(asked))
    # Refuse wrong options before a model is loaded.
    if search is not None:
        _must_be_plain(params, "beam_width" if asked.beam_width is not None else "contrastive")
    beams: dict[str, Any] = {"--length-penalty": asked.length_penalty, "--beam-groups": asked.num_beam_groups}
    beams |= {"--early-stopping": asked.early_stopping, "--diversity-penalty": asked.diversity_penalty}
    _must_go_with("--beam-width", asked.beam_width, beams)
    _must_go_with("--contrastive", asked.contrastive, {"--penalty-alpha": asked.penalty_alpha})
    _must_go_with("--stop", asked.stop, {"--include-stop": asked.include_stop_str_in_output or None})
    _must_go_with("--json", json, {"--echo": asked.echo or None, "--prompt-logprobs": asked.prompt_logprobs})
    config = EngineConfig.from_environment(**engine)
    with loading(config.model.model):
        from paged import LLM

        llm = LLM(config)
    if len(prompts) == 1 and not json and params.num_sequences == 1 and params.logprobs is None and search is None:
        answered = [_write_as_it_comes(llm, prompts[0], params)]
    else:
        answered = _answered(
            llm,
            prompts,
            search or params,
            lambda found: print_json(_document(llm.engine, found)) if json else _write(found),
        )
    cut = [each for each in answered if any(_is_cut(output, asked.max_tokens) for output in each.outputs)]
    if cut:
        say(
            f"{len(cut):,} of {counted(len(answered), 'answer')} ended before --max-tokens {asked.max_tokens:,}: the model's context, or memory, was full"
        )
    failed = [completion for completion in answered if completion.error is not None]
    if failed:
        why = f"{failed[0].id} with {failed[0].error}"
        say(f"{len(failed):,} of {counted(len(answered), 'request')} failed; {why}")
        raise typer.Exit(SOME_FAILED)


def _is_cut(output: "CompletionOutput", max_tokens: int) -> bool:
    return output.finish_reason == "length" and len(output.token_ids) < max_tokens


def _search(asked: Asked) -> BeamSearchParams | ContrastiveSearchParams | None:
    if asked.beam_width is not None and asked.contrastive:
        raise InvalidSampling("--beam-width and --contrastive are two searches; name one.")
    if asked.beam_width is not None:
        found = _of(BeamSearchParams, asked)
        if (early := asked.early_stopping) is not None:
            found["early_stopping"] = _EARLY.get(early, early)
        return BeamSearchParams(**found)
    return ContrastiveSearchParams(**_of(ContrastiveSearchParams, asked)) if asked.contrastive else None


def _of(kind: type[msgspec.Struct], asked: Asked) -> dict[str, Any]:
    """Return the options that were given for fields of `kind`, lists as tuples."""
    found = {name: getattr(asked, name, None) for name in kind.__struct_fields__}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found.items()
        if value not in (None, [])
    }


def _form(asked: Asked) -> StructuredOutputsParams | None:
    files = _named(json=asked.json_schema, grammar=asked.grammar)
    form: dict[str, Any] = {name: _decoded(str(file), file.read_bytes()) for name, file in files.items()}
    form |= _named(json_object=asked.json_object or None, regex=asked.regex, choice=tuple(asked.choice or ()) or None)
    return StructuredOutputsParams(**form) if form else None


def _biases(given: list[str] | None) -> dict[int, float] | None:
    if not given:
        return None
    found = {}
    for each in given:
        token, _, value = each.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise InvalidSampling(f"--logit-bias has to be ID=NUMBER; got {each!r}.") from None
    if len(found) < len(given):
        raise InvalidSampling(f"--logit-bias names a token id twice; got {', '.join(given)}.")
    return found


def _named(**options: Any) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _must_go_with(option: str, value: Any, others: dict[str, Any]) -> None:
    """Raise InvalidSampling if one of `others` was given without `option`, on which it depends."""
    for name in () if value else _named(**others):
        raise InvalidSampling(f"{name} goes with {option}; give both, or neither.")


def _must_be_plain(params: SamplingParams, search: str) -> None:
    """Raise InvalidSampling for a sampling parameter that a search does not have."""
    plain = SamplingParams(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
    for name in SamplingParams.__struct_fields__:
        value = getattr(params, name)
        if value != getattr(plain, name):
            raise InvalidSampling(
                f"{name} {value!r} does not go with {search}: a search goes by the model's own likelihoods alone."
            )


def _prompts(given: list[str] | None, file: str | None) -> list[str]:
    prompts = list(given or [])
    if file == "-" or (not prompts and file is None and not sys.stdin.isatty()):
        prompts += _lines("standard input", sys.stdin.buffer.read())
    elif file is not None:
        prompts += _lines(file, Path(file).read_bytes())
    if not prompts:
        raise NoPrompt("no prompt; give --prompt TEXT, --file FILE, or lines on standard input.")
    if "" in prompts:
        raise NoPrompt("a prompt is empty; at least one character is needed.")
    return prompts


def _lines(name: str, data: bytes) -> list[str]:
    # Not `splitlines`: a prompt may have a form feed, or a line separator of Unicode.
    return [line.rstrip("\n") for line in StringIO(_decoded(name, data), newline=None) if line.strip()]


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise NoPrompt(
            f"{name}, line {line}: byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8."
        ) from None


def _document(engine: "Engine", completions: "dict[int, Completion]") -> dict[str, Any]:
    stats = engine.stats()
    return {
        "model": str(engine.model.path),
        "backend": engine.runner.backend.name,
        "batch_invariant": engine.config.model.is_invariant_on(engine.model.device.type),
        "completions": [msgspec.to_builtins(completion) for _, completion in sorted(completions.items())],
        "stats": msgspec.to_builtins(stats),
        "groups": msgspec.to_builtins(engine.manager.stats().groups),
        "tokens_per_s": _tokens_per_s(stats),
    }


def _write_as_it_comes(llm: Any, prompt: str, params: SamplingParams) -> "Completion":
    out = console()
    # Printed before the first text, and not earlier: the engine may refuse the prompt.
    ahead = [prompt]

    def write(output: "EngineOutput") -> None:
        sys.stdout.write((ahead.pop() if ahead else "") + output.text)
        if out.is_terminal:
            sys.stdout.flush()

    try:
        (completion,) = llm.generate([prompt], params, on_output=write, use_tqdm=False)
    finally:
        if not ahead:
            printed("")
    return completion


def _write(completions: "dict[int, Completion]") -> None:
    for place, completion in sorted(completions.items()):
        for number, output in enumerate(completion.outputs, 1):
            name = f"{place + 1}.{number}" if len(completion.outputs) > 1 else f"{place + 1}"
            printed(f"[{name}] {completion.prompt}{output.text}")
            if output.logprobs is not None:
                _show_likelihoods(output)
            printed("")


def _show_likelihoods(output: "CompletionOutput") -> None:
    """Print a line for each token: its likelihood, and its alternatives."""
    lines = []
    for token, found in zip(output.token_ids, output.logprobs or (), strict=True):
        its = found[token]
        others = sorted((each for id, each in found.items() if id != token), key=lambda each: each.rank)
        shown = ", ".join(f"{each.decoded_token!r} {math.exp(each.logprob):.0%}" for each in others)
        lines.append((repr(its.decoded_token), f"{math.exp(its.logprob):.1%}", f"{its.rank:,}", shown))
    table("", ("token", "likely", "rank", "instead"), lines, right=(1, 2))


def _answered(
    llm: Any,
    prompts: list[str],
    params: SamplingParams | BeamSearchParams | ContrastiveSearchParams,
    show: "Callable[[dict[int, Completion]], None]",
) -> "list[Completion]":
    """Generate all answers, and show them at the end, or those so far after an interrupt; with a progress bar in a terminal."""
    found: dict[int, Completion] = {}
    try:
        with counting("answers", len(prompts)) as advance:

            def note(place: int, completion: "Completion") -> None:
                found[place] = completion
                advance(more=f"{_tokens_per_s(llm.engine.stats()):,.0f} tokens/s")

            answered: list[Completion] = llm.generate(prompts, params, on_completion=note, use_tqdm=False)
    except KeyboardInterrupt:
        show(found)
        say(f"interrupted; {len(found)} of {len(prompts)} prompts had been answered")
        raise
    show(found)
    return answered


def _tokens_per_s(stats: "EngineStats") -> float:
    seconds = stats.host_s + stats.model_s
    return stats.output_tokens / seconds if seconds else 0.0

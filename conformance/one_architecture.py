"""One family of decoders, small and of random weights: is it accepted, and does it then answer as transformers' `generate`, also when memory is short?

    python -m conformance.one_architecture NAME            # its Verdict as JSON
    python -m conformance.one_architecture NAME cuda       # on a GPU, where under pressure tokens have to be equal, and logits up to rounding

Everything goes a user's way: a checkpoint folder, `Engine`, `add_request`. What makes memory short are requests that begin alike, in the smallest
pool that one of them fits into, in several rounds; in each another one is the most important, so that each of them is preempted in some.
"""

from __future__ import annotations

import re
import sys
import tempfile
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from paged import POLICIES, Engine, SamplingParams
from paged.errors import InvalidConfig, NeverFits, UnsupportedModel
from paged.model.load_check import BOUND, difference, generated
from paged.model.loading import LoadedModel, config_of, load_model, reference_attention
from paged.model.shrinking import VOCABULARY, Shrunk
from paged.testing.engine_world import EngineRequest
from paged.testing.pressure import Answers, answers_in_turn, answers_of, differences

FAMILIES = Path(__file__).with_name("architectures.toml")
# Of every engine; on a GPU the batch-invariant mode has to be asked for.
ENGINE: dict[str, Any] = {"block_size": 4, "batch_invariant": True}
# Shorter than windows and chunks, as long, and longer; the longest one and its answer have as many tokens as a small model takes.
LENGTHS, MAX_TOKENS = (3, 11, 25, 43), 20
# Answers that repeat a token for ever would be equal by chance. Distinct tokens of all answers, at least.
LEAST_DISTINCT = 8
MOST_STEPS = 2000
_SPREAD, _SPREAD_OF_SINKS = 0.15, 2.0
# The default, but the request in the way goes to the host, whatever is cheaper.
_SWAPS = msgspec.structs.replace(POLICIES["paged"], name="swaps", preemption="swap")
# What each round does with those that are in the way.
ROUNDS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "without a cache": {"prefix_caching": False},
    "swap": {"host_blocks": 400, "policy": _SWAPS},
    "content on the host": {"host_blocks": 60, "host_caching": True},
    "step ahead": {"steps_ahead": 1},
    "drafts": {"speculate": "lookahead"},
}


class Verdict(msgspec.Struct, kw_only=True):
    """What became of a family.

    outcome    "equal"; "refused" by name; "wrong"; "no model": transformers made none, or could not run it
    why        of all but "equal": a sentence
    layers     how many of each kind of cache the small model has, as transformers says
    off        largest difference to the logits of `generate`, of the largest of them
    pressed    the same under pressure, to those of the request alone
    packed     the same without the batch-invariant mode, all requests at once; on a GPU decodes are captured there, where they can be
    distinct   different tokens in the answers
    preempted  requests that were preempted in some round, of len(LENGTHS); where what a request keeps does not grow, none need be
    left_out   rounds that the engine refuses for this model, each with why
    note       what else is to be said: where logits may be further off than BOUND, because transformers' own are
    """

    name: str
    outcome: str = "equal"
    why: str = ""
    layers: dict[str, int] = {}
    off: float = 0.0
    pressed: float = 0.0
    packed: float = 0.0
    distinct: int = 0
    preempted: int = 0
    left_out: dict[str, str] = {}
    note: str = ""


class Family(NamedTuple):
    """A row of architectures.toml. `fields` stand beside the defaults of the class; `is_whole`: they are a small model as they are."""

    name: str
    fields: dict[str, Any]
    is_whole: bool

    @property
    def model_type(self) -> str:
        """The first word of its name."""
        return self.name.split()[0]


def left_out() -> dict[str, list[str]]:
    """Return each reason not to try a model_type, and those that it holds for."""
    return tomllib.loads(FAMILIES.read_text(encoding="utf-8"))["left_out"]


def families() -> dict[str, Family]:
    """Return all rows by name, sorted."""
    table = tomllib.loads(FAMILIES.read_text(encoding="utf-8"))
    rows = [
        Family(name, fields, part == "whole") for part in ("small", "whole") for name, fields in table[part].items()
    ]
    return {row.name: row for row in sorted(rows)}


def verdict_of(family: Family, device: str = "cpu") -> Verdict:
    """Try a family, transformers' own answers on the same device. Raises nothing that a model or the engine raises."""
    verdict = Verdict(name=family.name)
    with tempfile.TemporaryDirectory(prefix="paged-architecture-") as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name) / family.model_type
        try:
            verdict.layers = save(family, folder)
            theirs = _generated(folder, device)
        except Exception as error:
            verdict.outcome, verdict.why = "no model", _said(error, folder)
            return verdict
        verdict.distinct = len({token for tokens in theirs.tokens.values() for token in tokens})
        try:
            model = load_model(folder, device=device)
        except UnsupportedModel as error:
            verdict.outcome, verdict.why = "refused", _said(error, folder)
            return verdict
        except Exception as error:
            verdict.outcome, verdict.why = "wrong", _said(error, folder)
            return verdict
        try:
            problems = _problems(model, theirs, verdict)
        except Exception as error:
            problems = [_said(error, folder)]
        if problems:
            verdict.outcome, verdict.why = "wrong", problems[0]
        return verdict


def save(family: Family, folder: Path) -> dict[str, int]:
    """Write a checkpoint; return how many layers have each kind of cache."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.cache_utils import get_layer_types_and_kwargs

    # Untied: random text that is tied to large embeddings repeats its last word for ever.
    config = AutoConfig.for_model(family.model_type, **{"tie_word_embeddings": False, **family.fields})
    if not family.is_whole:
        config = Shrunk(config).config
    build: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        module = build(config, dtype=torch.float32)
        for path, weights in module.named_parameters():
            if weights.dim() >= 2:
                weights.normal_(0, _SPREAD)
            elif path.endswith(".sinks"):
                weights.normal_(0, _SPREAD_OF_SINKS)
    module.save_pretrained(folder)
    return dict(Counter(get_layer_types_and_kwargs(module.config.get_text_config())[0]))


def _requests() -> list[EngineRequest]:
    """Their prompts begin as the longest does."""
    words = np.random.default_rng(1).integers(4, VOCABULARY, max(LENGTHS)).tolist()
    return [
        EngineRequest(id=str(length), prompt=[*words[: length - 1], length], max_tokens=MAX_TOKENS)
        for length in LENGTHS
    ]


def _generated(folder: Path, device: str) -> Answers:
    """What transformers writes after each prompt, greedily, with its own attention (`reference_attention`)."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    module = load(folder, attn_implementation=reference_attention(config_of(folder))).to(device).eval()
    module.generation_config.eos_token_id = None
    answers = Answers()
    for request in _requests():
        ids = torch.tensor([request.prompt], device=device)
        out = generated(module, ids, MAX_TOKENS)
        who = (request.id, 0)
        answers.tokens[who] = out.sequences[0, ids.shape[1] :].tolist()
        answers.logits[who] = [each[0].float().cpu().numpy() for each in out.logits]
        if not np.isfinite(answers.logits[who]).all():
            raise ArithmeticError("its logits are not finite")
    return answers


def _apart(folder: Path, theirs: Answers, device: torch.device) -> float:
    """The largest difference between transformers' own logits of prompts and answers, token by token with its cache and all at once."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    module = load(folder, attn_implementation=reference_attention(config_of(folder))).to(device).eval()
    apart = 0.0
    for request in _requests():
        ids = torch.tensor([[*request.prompt, *theirs.tokens[request.id, 0]]], device=device)
        with torch.inference_mode():
            whole, cache, steps = module(input_ids=ids, use_cache=False).logits[0], None, []
            for at in range(ids.shape[1]):
                out = module(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                steps.append(out.logits[0, 0])
        apart = max(apart, difference(torch.stack(steps), whole))
    return apart


def _problems(model: LoadedModel, theirs: Answers, verdict: Verdict) -> list[str]:
    """What is not as it should be, in sentences, the first of which counts; the verdict gets its figures."""
    alone = _alone(model)
    problems = [
        f"alone, request {who[0]}: tokens {alone.tokens[who]} instead of {tokens}."
        for who, tokens in theirs.tokens.items()
        if alone.tokens[who] != tokens
    ]
    verdict.off = max(_off(alone.logits[who], logits) for who, logits in theirs.logits.items())
    bound = BOUND
    if verdict.off > BOUND:
        apart = _apart(model.path, theirs, model.device)
        # Of two answers of transformers' own neither is the right one.
        if verdict.off > max(BOUND, 2 * apart):
            problems.append(f"alone: logits are off by {verdict.off:.1e} of the largest; {BOUND:.0e} is allowed.")
        else:
            bound = 2 * apart
            verdict.note = f"transformers' own logits are {apart:.1e} apart, token by token and at once."
    if verdict.distinct < LEAST_DISTINCT:
        problems.append(
            f"all answers have {verdict.distinct} different tokens, of {LEAST_DISTINCT} that say something."
        )
    preempted = set[str]()
    packed = answers_of(Engine(model, num_blocks=500, **{**ENGINE, "batch_invariant": False}), _requests(), MOST_STEPS)
    verdict.packed, differing = _beyond_rounding(packed, alone, bound)
    problems += [f"packed, {each}" for each in differing + packed.violations]
    grows = any(group.kind == "full" for group in Engine(model, num_blocks=500, **ENGINE).manager.layout.groups)
    for name, number, more, percent in _rounds(preempted, grows):
        options = ROUNDS[name]
        try:
            num_blocks = _smallest_pool(model, max(LENGTHS) + MAX_TOKENS, options) * percent // 100
            if more:
                num_blocks += _smallest_pool(model, more, options)
            found = _starved(model, {"num_blocks": num_blocks, **options}, number, preempted)
        except (InvalidConfig, UnsupportedModel) as error:
            verdict.left_out[name] = _said(error, model.path)
            continue
        if model.device.type == "cpu":
            differing = differences(found, alone)
        else:
            # A device's products round by how many rows they have; how far that moves logits is said.
            off, differing = _beyond_rounding(found, alone, BOUND)
            verdict.pressed = max(verdict.pressed, off)
        problems += [f"{name}, {each}" for each in differing + found.violations]
    verdict.preempted = len(preempted)
    if verdict.preempted < len(LENGTHS) and grows:
        problems.append(f"{verdict.preempted} of {len(LENGTHS)} requests were preempted in some round.")
    return problems


def _rounds(preempted: set[str], grows: bool) -> Iterator[tuple[str, int, int, int]]:
    """Each kind of round, who is the most important one in it, for how many tokens its pool has memory beside the longest request, and of how many percent of
    the smallest pool it is. Where a state takes most of that none but that one would be let in; so rounds without a cache go on, with memory for a second
    one that has to go, and in larger and larger pools where what a request keeps grows: until each request was preempted, or all such pools are tried."""
    yield from ((name, number % len(LENGTHS), 0, 100) for number, name in enumerate(ROUNDS))
    pools = [*((more, 100) for more in LENGTHS), *((0, percent) for percent in range(110, 400 if grows else 0, 20))]
    for more, percent in pools:
        for number in range(len(LENGTHS)):
            if len(preempted) < len(LENGTHS):
                yield "without a cache", number, more, percent


def _alone(model: LoadedModel) -> Answers:
    """One request after the other, its prompt in one step, in memory that it cannot fill."""
    longest = max(LENGTHS) + MAX_TOKENS
    engine = Engine(model, num_blocks=500, **ENGINE, prefix_caching=False, max_tokens_per_step=longest, max_sequences=1)
    return answers_in_turn(engine, _requests(), MOST_STEPS)


def _starved(model: LoadedModel, options: dict[str, Any], first: int, preempted: set[str]) -> Answers:
    """All at once, prompts in chunks; request number `first` is the most important one. Those that are preempted are added to the set."""
    engine = Engine(model, **ENGINE, max_tokens_per_step=16, max_chunk=7, **options)
    engine.on_batch = lambda batch: preempted.update(id for id, _ in batch.preempted)
    count = len(LENGTHS)
    requests = [
        msgspec.structs.replace(request, priority=(place - first) % count) for place, request in enumerate(_requests())
    ]
    answers = answers_of(engine, requests, MOST_STEPS)
    for who, tokens in answers.tokens.items():
        # A step ahead, logits behind the last token are shown, too.
        del answers.logits[who][len(tokens) :]
    return answers


def _smallest_pool(model: LoadedModel, num_tokens: int, options: dict[str, Any]) -> int:
    """Blocks that a request of so many tokens, the last of which is an output, needs at its end."""
    num_blocks = 1
    while True:
        try:
            engine = Engine(model, num_blocks=num_blocks, **ENGINE, **options)
            engine.add_request([1] * (num_tokens - 1), SamplingParams(max_tokens=1))
            return num_blocks
        except NeverFits as error:
            num_blocks = max(error.blocks_needed or 0, num_blocks + 1)


def _off(ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference, as a part of the largest number."""
    if len(ours) != len(theirs):
        return np.inf
    return difference(*(torch.from_numpy(np.array(rows)) for rows in (ours, theirs)))


def _beyond_rounding(ours: Answers, theirs: Answers, bound: float) -> tuple[float, list[str]]:
    """`_off` of the answer that is furthest off of those with the same tokens, and what differs by more than this bound, in sentences."""
    offs = [_off(ours.logits[who], its) for who, its in theirs.logits.items() if ours.tokens[who] == theirs.tokens[who]]
    off = max(offs, default=0.0)
    found = [each for each in differences(ours, theirs) if "logits" not in each]
    if off > bound:
        found.append(f"logits are off by {off:.1e} of the largest; {bound:.0e} is allowed.")
    return off, found


def _said(error: Exception, folder: Path) -> str:
    """The first line of an error, without the folder and without what else there is; of one that is not ours, its class, too."""
    said = re.split("; (?=[A-Z])", (str(error).splitlines() or [""])[0].removeprefix(f"{folder}: "))[0]
    return said if type(error).__module__.startswith("paged") else f"{type(error).__name__}: {said}"


def main(name: str, device: str = "cpu") -> None:
    """Print the verdict of one family as JSON."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with redirect_stdout(sys.stderr):
        verdict = verdict_of(families()[name], device)
    sys.stdout.write(msgspec.json.encode(verdict).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])

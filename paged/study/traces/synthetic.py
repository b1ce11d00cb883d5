"""Traces of made-up services: arrivals and lengths from distributions, and conversations of several turns."""

import math
import sys
from statistics import NormalDist
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from paged.base.fields import converted
from paged.errors import InvalidConfig
from paged.study.limits import MAX_TOKENS, at_least, between, generators, positive
from paged.study.traces.content import MAX_REQUESTS, UNSHARED, Ids, ranges, starts_of
from paged.study.traces.trace import Trace, nothing_said

MAX_SIGMA = 10.0
"""At this spread, one of two lengths is more than 10,000 times the other half of the time."""


class LogNormal(msgspec.Struct, frozen=True):
    """Lengths whose logarithms are normal with mean `mu` and standard deviation `sigma`; the median is exp(mu) tokens."""

    mu: float
    sigma: float

    @classmethod
    def of_mean(cls, mean: float, *, sigma: float) -> "LogNormal":
        """Return the distribution with this mean in tokens: mean = exp(mu + sigma² / 2). Raises InvalidConfig."""
        return cls(math.log(positive("mean", mean)) - between("sigma", sigma, 0, MAX_SIGMA) ** 2 / 2, sigma)

    @classmethod
    def of_quantile(cls, mean: float, *, share: float, tokens: float) -> "LogNormal":
        """Return the distribution with this mean of which a `share` of all lengths are under `tokens`.

        ln tokens = mu + z · sigma and ln mean = mu + sigma² / 2 have two solutions or none; the smaller spread is taken. Raises InvalidConfig if
        there is none.
        """
        positive("mean", mean)
        positive("tokens", tokens)
        converted("share", share, Annotated[float, Meta(gt=0, lt=1)])
        z = NormalDist().inv_cdf(share)
        ratio = math.log(tokens) - math.log(mean)
        under_root = z * z - 2 * ratio
        roots = [z - math.sqrt(under_root), z + math.sqrt(under_root)] if under_root >= 0 else []
        sigmas = [root for root in roots if root >= 0]
        if not sigmas:
            problem = (
                f"no log-normal distribution has a mean of {mean:g} and {share:.0%} of its values under {tokens:g}"
            )
            raise InvalidConfig(f"{problem}; at most {mean * math.exp(max(z, 0) ** 2 / 2):g} are possible")
        return cls.of_mean(mean, sigma=min(sigmas))

    @property
    def mean(self) -> float:
        """The mean in tokens."""
        return math.exp(self.mu + self.sigma**2 / 2)

    def check(self, what: str) -> None:
        """Raise InvalidConfig unless it is a distribution of lengths that a request can have."""
        between(f"mu of {what}", self.mu, -sys.float_info.max, sys.float_info.max)
        between(f"sigma of {what}", self.sigma, 0, MAX_SIGMA)
        exponent = self.mu + self.sigma**2 / 2
        if exponent > math.log(MAX_TOKENS):
            raise InvalidConfig(f"{what} have a mean of e^{exponent:g} tokens; at most {MAX_TOKENS:,} are possible")

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Draw lengths in whole tokens, from 1 to MAX_TOKENS; int64 [count]."""
        lengths = np.rint(random.lognormal(self.mu, self.sigma, count))
        return np.clip(lengths, 1, MAX_TOKENS).astype(np.int64)


class LengthPreset(msgspec.Struct, frozen=True):
    """Named lengths; `source` says what is published and what we assume."""

    prompt: LogNormal
    output: LogNormal
    source: str


_AZURE_SPREAD = "sigmas are those of the logarithms of the Azure conversation hour's lengths, an assumption"

PRESETS = {
    "sharegpt": LengthPreset(
        LogNormal.of_mean(161.31, sigma=0.99),
        LogNormal.of_mean(337.99, sigma=0.86),
        f"means: Kwon et al., SOSP '23, figure 11 (ShareGPT); {_AZURE_SPREAD}",
    ),
    "alpaca": LengthPreset(
        LogNormal.of_mean(19.31, sigma=0.99),
        LogNormal.of_mean(58.45, sigma=0.86),
        f"means: Kwon et al., SOSP '23, figure 11 (Alpaca); {_AZURE_SPREAD}",
    ),
    "reasoning": LengthPreset(
        LogNormal.of_mean(200.0, sigma=0.99),
        LogNormal.of_mean(5000.0, sigma=0.86),
        "nothing published: short questions and answers that think for some thousand tokens, an assumption; the same sigmas",
    ),
}


PROCESSES = {
    "poisson": "independent of each other: gaps are exponential (cv 1)",
    "gamma": "in bursts: gaps are gamma-distributed with the coefficient of variation `cv` (1 is poisson, more is burstier)",
    "deterministic": "one every 1/rate seconds",
    "at-once": "all at 0",
}

Lengths = int | LogNormal

DEFAULT_RATE = 1.0

CV_LIMITS = (0.01, 100.0)
"""Below, arrivals are as good as deterministic; above, a trace of a million requests cannot show the bursts."""

MAX_TURNS = 10_000.0
MAX_PAUSE_S = 1e9

MAX_SEGMENTS = 2**28
"""More do not fit in the memory of most machines (2 GB a column). The prompt of a conversation's turn k has 2k + 1 segments."""


def synthetic(
    process: str = "poisson",
    *,
    requests: int = 1000,
    rate: float | None = None,
    cv: float | None = None,
    lengths: str | Trace = "sharegpt",
    prompt: Lengths | None = None,
    output: Lengths | None = None,
    system_tokens: int = 0,
    turns: float = 1.0,
    think_s: float = 30.0,
    token_s: float = 0.05,
    seed: int = 0,
    name: str = "synthetic",
) -> Trace:
    """Make a trace of `requests` requests, the same for the same arguments.

    process        of arrivals: see PROCESSES; `cv` is gamma's
    rate           expected requests a second; None: 1. With turns, rate / turns conversations begin each second
    lengths        of prompts and outputs: the name of a preset, or a trace, whose pairs of lengths are drawn with replacement
    prompt, output override one side of `lengths`: a number of tokens, or a distribution
    system_tokens  first tokens that all prompts share, before those of `prompt`
    turns          mean number of turns of a conversation, which is geometric: after each answer it goes on with probability 1 − 1/turns
    think_s        mean of the exponential pause between an answer and the next turn
    token_s        assumed seconds of each token of an answer: the next turn arrives so much later

    The prompt of a later turn is the conversation so far and `prompt` new tokens. An earlier output has the segment id of its turn's `output_ids`. So
    a prefix cache can hit all of the conversation if the stand-in for the model says `output`, else the prompt of the turn before. The last
    conversations are still under way when no new one begins, and the last of all may be cut short, to get exactly `requests` requests. Arrivals,
    lengths, turns and pauses have separate generators, so another rate does not change lengths.

    Raises InvalidConfig with value and limit, for all but the number of segments before anything is drawn.
    """
    at_least("requests", requests, 1, MAX_REQUESTS)
    _check_process(process, rate, cv)
    at_least("system_tokens", system_tokens, 0, MAX_TOKENS)
    between("turns", turns, 1, MAX_TURNS)
    between("think_s", think_s, 0, MAX_PAUSE_S)
    between("token_s", token_s, 0, MAX_PAUSE_S)
    for what, side in (("prompts", prompt), ("outputs", output)):
        if isinstance(side, LogNormal):
            side.check(what)
        elif side is not None:
            at_least(what, side, 1, MAX_TOKENS)
    if not isinstance(lengths, Trace) and (not isinstance(lengths, str) or lengths not in PRESETS):
        raise InvalidConfig(f'lengths are "{lengths}"; known are {", ".join(PRESETS)}, and those of a trace')
    at, lengths_at, turns_at, pauses = generators(seed, 4)

    new_tokens, output_tokens = _drawn(lengths, requests, lengths_at)
    prompt_random, output_random = lengths_at.spawn(2)
    if prompt is not None:
        new_tokens = _of_side(prompt, requests, prompt_random)
    if output is not None:
        output_tokens = _of_side(output, requests, output_random)

    num_turns = _turns(requests, turns, turns_at)
    num_segments = int((num_turns**2).sum())
    if num_segments > MAX_SEGMENTS:
        problem = f"{requests:,} requests in conversations of {turns:g} turns have {num_segments:,} segments"
        raise InvalidConfig(f"{problem}; at most {MAX_SEGMENTS:,} are possible")
    begins = _arrivals(process, len(num_turns), (rate or DEFAULT_RATE) / turns, cv, at)
    pause_s = pauses.exponential(think_s, requests) + token_s * output_tokens
    return _assembled(
        name, begins, num_turns, pause_s, new_tokens, output_tokens, system_tokens=system_tokens, seed=seed
    )


def _check_process(process: str, rate: float | None, cv: float | None) -> None:
    """Raise InvalidConfig for an unknown process, and for a rate or cv that it lacks or cannot have."""
    if not isinstance(process, str) or process not in PROCESSES:
        raise InvalidConfig(f'"{process}" is no arrival process; known are {", ".join(PROCESSES)}')
    if rate is not None:
        positive("rate", rate)
        if process == "at-once":
            raise InvalidConfig(f"rate is {rate:g}, but at-once has none: all requests arrive at 0")
    if cv is not None:
        between("cv", cv, *CV_LIMITS)
        if process != "gamma":
            raise InvalidConfig(f"cv is {cv:g}, but {process} has none; gamma has")
    elif process == "gamma":
        raise InvalidConfig("gamma needs cv, the coefficient of variation of the gaps between arrivals")


def _arrivals(
    process: str, count: int, rate: float, cv: float | None, random: np.random.Generator
) -> NDArray[np.float64]:
    """Draw arrivals in seconds, float64 [count], never falling; the first is 0. `rate` is the expected number in a second."""
    if process == "at-once":
        return np.zeros(count)
    num_gaps = count - 1
    if process == "deterministic":
        gaps = np.full(num_gaps, 1 / rate)
    elif process == "gamma" and cv is not None:
        # A gamma distribution of shape k has a coefficient of variation of 1/√k.
        gaps = random.gamma(1 / cv**2, cv**2 / rate, num_gaps)
    else:
        gaps = random.exponential(1 / rate, num_gaps)
    return np.concatenate((np.zeros(1), np.cumsum(gaps)))


def _of_side(lengths: Lengths, count: int, random: np.random.Generator) -> Ids:
    """Return the same number of tokens, or draw; int64 [count]."""
    return lengths.draw(count, random) if isinstance(lengths, LogNormal) else np.full(count, lengths, np.int64)


def _drawn(lengths: str | Trace, count: int, random: np.random.Generator) -> tuple[Ids, Ids]:
    """Draw prompt and output lengths, int64 [count] each; those of a trace in pairs, since they may depend on each other."""
    if isinstance(lengths, Trace):
        chosen = random.integers(0, len(lengths), count)
        return lengths.prompt_tokens[chosen], lengths.output_tokens[chosen]
    preset, (prompt_random, output_random) = PRESETS[lengths], random.spawn(2)
    return preset.prompt.draw(count, prompt_random), preset.output.draw(count, output_random)


def _turns(requests: int, turns: float, random: np.random.Generator) -> Ids:
    """Draw the number of turns of each conversation, int64 [conversations]; in all as many as there are requests."""
    ends = np.cumsum(random.geometric(1 / turns, requests))
    num_conversations = int(np.searchsorted(ends, requests)) + 1
    ends = np.minimum(ends[:num_conversations], requests)
    return np.diff(ends, prepend=0)


def _assembled(
    name: str,
    begins: NDArray[np.float64],
    num_turns: Ids,
    pause_s: NDArray[np.float64],
    new_tokens: Ids,
    output_tokens: Ids,
    *,
    system_tokens: int,
    seed: int,
) -> Trace:
    """Make a trace, in order of arrival, of turns in the order of conversations.

    Turn t has two contents: 2t, the new part of its prompt, and 2t + 1, its output. Turns of a conversation have consecutive numbers, so the prompt
    of turn t is the range of contents 2f to 2t, where f is the conversation's first turn. The shared beginning of all prompts is content 2n.
    """
    num_requests = len(new_tokens)
    first_turns = np.repeat(starts_of(num_turns)[:-1], num_turns)
    since_begin = np.cumsum(pause_s) - pause_s
    arrival_s = np.repeat(begins, num_turns) + (since_begin - since_begin[first_turns])
    order = np.argsort(arrival_s, kind="stable")

    content_lengths = np.append(np.column_stack((new_tokens, output_tokens)).ravel(), system_tokens)
    counts = 2 * (order - first_turns[order]) + 1
    contents = ranges(2 * first_turns[order], counts)
    starts = starts_of(counts)
    if system_tokens:
        contents = np.insert(contents, starts[:-1], 2 * num_requests)
        starts += np.arange(num_requests + 1)
    # Every conversation has one turn: only the beginning is shared.
    is_single = len(num_turns) == num_requests
    is_shared = contents == 2 * num_requests if is_single else np.ones(len(contents), np.bool_)
    return Trace(
        name=name,
        arrival_s=arrival_s[order] - arrival_s[order[0]],
        output_tokens=output_tokens[order],
        segment_starts=starts,
        segment_ids=np.where(is_shared, contents, UNSHARED),
        segment_lengths=content_lengths[contents],
        **nothing_said(num_requests) | ({} if is_single else {"output_ids": 2 * order + 1}),
        seed=seed,
    )

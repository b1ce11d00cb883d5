"""Traces by name: a file, an excerpt of a published trace that ships with the package (see `data/README.md`), or a generator,
whose description the command line takes: `synthetic:poisson,rate=2,requests=1000,lengths=sharegpt,seed=1`.
"""

import difflib
import errno
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from paged.errors import InvalidConfig, InvalidSpec
from paged.study.traces.formats import read_trace
from paged.study.traces.synthetic import PRESETS, PROCESSES, LogNormal, synthetic
from paged.study.traces.trace import Trace


class Excerpt(msgspec.Struct, frozen=True):
    """Some requests of a published trace, unchanged and in order; `summary` says which.

    note  what was left out, for readers of figures
    """

    name: str
    file: str
    summary: str
    note: str
    source: str
    licence: str

    @property
    def path(self) -> Path:
        """The file of the excerpt."""
        return Path(__file__).parent / "data" / self.file


EXCERPTS = {
    "azure": Excerpt(
        name="azure",
        file="azure_conversation.csv",
        summary="the first 500 requests of a conversation service's hour, November 2023",
        note="excerpt: the first 500 of 19,366 requests",
        source="Microsoft, Azure Public Dataset (Splitwise, ISCA '24), github.com/Azure/AzurePublicDataset",
        licence="CC-BY 4.0",
    ),
    "mooncake": Excerpt(
        name="mooncake",
        file="mooncake_conversation.jsonl",
        summary="the first 300 requests with prompts of up to 4,096 tokens of a chat service's hour, with the prefixes they share",
        note="excerpt: 300 of 12,031 requests, the first with prompts of up to 4,096 tokens, as a third of all have",
        source="Moonshot AI, Mooncake (FAST '25), github.com/kvcache-ai/Mooncake",
        licence="Apache-2.0",
    ),
}


def open_trace(name: str, *, limit: int | None = None, seed: int = 0) -> Trace:
    """Open the trace in a file, an excerpt by its name, or a synthetic trace by its description (`synthetic:…`); a file comes first.

    `limit` takes the first requests. `seed` chooses the prompts' tokens, and the draws of a synthetic trace without a seed of its own. Raises
    TraceError, InvalidSpec, InvalidConfig or OSError.
    """
    path, note = Path(name), ""
    if is_synthetic(name):
        trace = _made_up(name, seed)
        return trace if limit is None else trace.head(limit)
    if not _is_there(path):
        if name not in EXCERPTS:
            nearest = difflib.get_close_matches(name, EXCERPTS, n=1)
            hint = f'; did you mean "{nearest[0]}"?' if nearest else ""
            known = f"an excerpt that ships with paged ({', '.join(sorted(EXCERPTS))}), nor {PREFIX}…"
            raise FileNotFoundError(errno.ENOENT, f"no such file, nor {known}{hint}", name)
        path, note = EXCERPTS[name].path, EXCERPTS[name].note
    return replace(read_trace(path, limit=limit, seed=seed), note=note)


def is_synthetic(name: str) -> bool:
    """Whether `open_trace` generates the trace of this name."""
    return name.startswith(PREFIX) and not _is_there(Path(name))


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a description may be too long for a file's name
        return False


def _made_up(spec: str, seed: int) -> Trace:
    arguments = parsed_spec(spec)
    lengths = arguments.get("lengths")
    if lengths is not None and lengths not in PRESETS:
        path = Path(lengths)
        if not _is_there(path):
            if lengths not in EXCERPTS:
                raise unknown_lengths(spec, lengths, EXCERPTS)
            path = EXCERPTS[lengths].path
        arguments["lengths"] = read_trace(path)
    try:
        return synthetic(**{"seed": seed, "name": spec, **arguments})
    except InvalidConfig as problem:
        raise InvalidSpec(spec, "", str(problem)) from None


PREFIX = "synthetic:"

_WHOLE = ("requests", "system_tokens", "seed", "prompt", "output")
_REAL = ("rate", "cv", "turns", "think_s", "token_s")
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_FIGURES = ("mean", "mu", "sigma", *_QUANTILES)
_DISTRIBUTIONS = tuple(f"{side}_{figure}" for side in ("prompt", "output") for figure in _FIGURES)

KEYS = (*_WHOLE, *_REAL, "lengths", *_DISTRIBUTIONS)
"""The names that may stand before an equals sign."""


def parsed_spec(spec: str) -> dict[str, Any]:
    """Return the arguments of `synthetic` for a string; `lengths` stays text.

    Raises InvalidSpec with the part that is wrong: an unknown process or key, a text in place of a number, and a distribution with a figure too few
    or too many, or that does not exist. `synthetic` checks all other limits.
    """
    first, *rest = [part.strip() for part in spec.removeprefix(PREFIX).split(",")]
    if first not in PROCESSES:
        raise InvalidSpec(spec, first, f"the first part is an arrival process: {_known(first, PROCESSES)}")
    arguments: dict[str, Any] = {"process": first}
    figures: dict[str, float] = {}
    for part in rest:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in KEYS:
            raise InvalidSpec(spec, part, f'"{key}" is no key; {_known(key, KEYS)}')
        if not equals or not value:
            raise InvalidSpec(spec, part, f"there is no value; {key}=… is needed")
        if key in arguments or key in figures:
            raise InvalidSpec(spec, part, f"{key} stands there twice")
        if key == "lengths":
            arguments[key] = value
        elif key in _DISTRIBUTIONS:
            figures[key] = _number(spec, part, value, float)
        else:
            arguments[key] = _number(spec, part, value, int if key in _WHOLE else float)
    for side in ("prompt", "output"):
        given = {key.removeprefix(f"{side}_"): value for key, value in figures.items() if key.startswith(f"{side}_")}
        if given:
            if side in arguments:
                raise InvalidSpec(
                    spec, f"{side}={arguments[side]}", f"{side} has a distribution, too: {_list(given, side)}"
                )
            arguments[side] = _log_normal(spec, side, given)
    return arguments


def unknown_lengths(spec: str, name: str, excerpts: Iterable[str]) -> InvalidSpec:
    """Return the error for lengths that are neither a preset, nor an excerpt, nor a file."""
    problem = f'"{name}" is no preset, excerpt or file; {_known(name, (*PRESETS, *excerpts))}'
    return InvalidSpec(spec, f"lengths={name}", problem)


def _log_normal(spec: str, side: str, given: dict[str, float]) -> LogNormal:
    names = set(given)
    try:
        if names == {"mu", "sigma"}:
            distribution = LogNormal(given["mu"], given["sigma"])
            distribution.check(f"{side}s")
            return distribution
        if names == {"mean", "sigma"}:
            return LogNormal.of_mean(given["mean"], sigma=given["sigma"])
        if len(names) == 2 and "mean" in names and (quantile := names & set(_QUANTILES)):
            figure = quantile.pop()
            return LogNormal.of_quantile(given["mean"], share=_QUANTILES[figure], tokens=given[figure])
    except InvalidConfig as problem:
        raise InvalidSpec(spec, _list(given, side), str(problem)) from None
    wanted = f"{side}_mean with {side}_sigma or one of {', '.join(f'{side}_{name}' for name in _QUANTILES)}"
    raise InvalidSpec(
        spec, _list(given, side), f"a log-normal distribution is {wanted}, or {side}_mu with {side}_sigma"
    )


def _number(spec: str, part: str, value: str, kind: type[int] | type[float]) -> float:
    try:
        if "_" in value:  # int() and float() take 1_000
            raise ValueError
        return kind(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InvalidSpec(spec, part, f'"{value[:40]}" is not {what}') from None


def _known(name: str, known: Iterable[str]) -> str:
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    return f"known are {', '.join(names)}" + (f'; did you mean "{nearest[0]}"?' if nearest else "")


def _list(given: dict[str, float], side: str) -> str:
    return ",".join(f"{side}_{figure}={value:g}" for figure, value in given.items())

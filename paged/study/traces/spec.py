"""Synthetic traces in a string, as the command line takes them: `synthetic:poisson,rate=2,requests=1000,lengths=sharegpt,seed=1`."""

import difflib
from collections.abc import Iterable
from typing import Any

from paged.errors import InvalidConfig, InvalidSpec
from paged.study.traces.lengths import PRESETS, LogNormal
from paged.study.traces.synthetic import PROCESSES

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

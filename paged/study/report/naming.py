"""Names of outcomes: a policy, and the setting in which policies are compared; and a colour for each policy."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict

from paged.study.simulator import Outcome

# Okabe and Ito's colours without yellow, which is too pale for a line (https://jfly.uni-koeln.de/color/); then again, dashed, then dotted.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#808080")
_DASHES = ("solid", "dash", "dot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")

_OURS = "paged"
_LOADS = ("rate", "clients")
"""What makes a load heavier."""


_NO_OPTIONS = {"load", "device", "policy", "routing", "resampled", "least_span_s"}
"""Parts of a scenario, what follows from the seed and the rate, and the policy."""


class Look(msgspec.Struct, frozen=True):
    """A policy's look in all plots: a CSS colour, a line's dash, a marker's symbol."""

    colour: str
    dash: str
    symbol: str


class Named(msgspec.Struct, frozen=True, eq=False):
    """An outcome with its names.

    label    unique in a setting: the policy, with a number if it occurs twice
    setting  the options in which outcomes of one policy differ; "" if there are none
    line     the same without load and seed
    load     rate and clients, if outcomes differ in them
    """

    outcome: Outcome
    label: str
    setting: str
    line: str
    load: str
    look: Look

    @property
    def policy(self) -> str:
        return self.outcome.result.policy

    @property
    def drawn(self) -> dict[str, Any]:
        """Name of a plot's trace, and the policy by which the page hides it."""
        return {"name": self.label, "meta": {"policy": self.policy}}


def named(outcomes: Sequence[Outcome]) -> list[Named]:
    """Name each outcome, in order."""
    # Requests a second differ a little between seeds: the first one's count.
    paces: dict[tuple[str, float], str] = {}
    for outcome in outcomes:
        load = outcome.scenario.load
        paces.setdefault((load.trace, load.rate), outcome.load.pace(load.rate))
    facts = [_varying(outcome, paces) for outcome in outcomes]
    policies = [outcome.result.policy for outcome in outcomes]
    names = [key for key in facts[0] if _tells_apart(key, facts, policies)] if facts else []
    ours_first = sorted(dict.fromkeys(policies), key=lambda policy: policy != _OURS)
    looks = {policy: _look(number) for number, policy in enumerate(ours_first)}
    times: dict[tuple[str, str], int] = {}
    found = []
    for outcome, fact, policy in zip(outcomes, facts, policies):
        setting = _joined(fact, names)
        time = times[policy, setting] = times.get((policy, setting), 0) + 1
        found.append(
            Named(
                outcome,
                label=policy if time == 1 else f"{policy} ({time})",
                setting=setting,
                line=_joined(fact, [key for key in names if key not in (*_LOADS, "seed")]),
                load=_joined(fact, [key for key in names if key in _LOADS]),
                look=looks[policy],
            )
        )
    return found


def ours_last(outcomes: Sequence[Named]) -> list[Named]:
    """Sort outcomes so that our policy is drawn last, on top of the others."""
    return sorted(outcomes, key=lambda one: one.policy == _OURS)


def _varying(outcome: Outcome, paces: Mapping[tuple[str, float], str]) -> dict[str, str]:
    """Return all options that a study may vary beside the policy, as text; `paces` by trace and rate."""
    scenario, load, budget = outcome.scenario, outcome.scenario.load, outcome.result.max_tokens_per_step
    told = {
        "trace": outcome.result.trace,
        "rate": paces[load.trace, load.rate],
        "max_tokens_per_step": "no budget" if budget is None else f"budget {budget:,}",
    }
    given = {name: value for part in (load, scenario.device, scenario) for name, value in asdict(part).items()}
    return {name: told.get(name) or _said(name, value) for name, value in given.items() if name not in _NO_OPTIONS}


def _said(name: str, value: Any) -> str:
    """Return an option in words."""
    if isinstance(value, msgspec.Struct):
        value = ", ".join(f"{each} {number:g}" for each, number in asdict(value).items())
    name = name.replace("_", " ")
    return f"{name} not given" if value is None else f"{name} {value:,}" if type(value) is int else f"{name} {value}"


def _tells_apart(key: str, facts: Sequence[Mapping[str, str]], policies: Sequence[str]) -> bool:
    """Whether a policy occurs with two values of the option. An option that differs between policies alone (their own budget) makes no setting."""
    pairs = {(policy, fact[key]) for policy, fact in zip(policies, facts)}
    return len(pairs) > len(set(policies))


def _joined(fact: Mapping[str, str], keys: Sequence[str]) -> str:
    return " · ".join(fact[key] for key in keys)


def _look(number: int) -> Look:
    lap, place = divmod(number, len(_COLOURS))
    return Look(_COLOURS[place], _DASHES[lap % len(_DASHES)], _SYMBOLS[(place + lap) % len(_SYMBOLS)])

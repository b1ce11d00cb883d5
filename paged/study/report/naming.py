"""Names of outcomes: a policy, and the setting in which policies are compared; and a colour for each policy."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paged.study.simulator import Outcome

# Okabe and Ito's colours without yellow, which is too pale for a line (https://jfly.uni-koeln.de/color/); then again, dashed, then dotted.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#808080")
_DASHES = ("solid", "dash", "dot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")

_OURS = "paged"
_LOADS = ("rate", "clients")
"""What makes a load heavier."""


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
    scenario, load, device = outcome.scenario, outcome.scenario.load, outcome.scenario.device
    budget = outcome.result.max_tokens_per_step
    return {
        "trace": outcome.result.trace,
        "half": f"{load.half} half" if load.half else "all",
        "limit": "no limit" if load.limit is None else f"{load.limit:,} requests",
        "rate": paces[load.trace, load.rate],
        "clients": "open loop" if load.clients is None else f"{load.clients:,} clients",
        "prompts": f"prompts × {load.prompts:g}",
        "outputs": f"outputs × {load.outputs:g}",
        "context": "no context limit" if load.context is None else f"context {load.context:,}",
        "over_long": f"over-long: {load.over_long}",
        "declared": "exact max_tokens" if load.declared is None else f"declared {load.declared:,}",
        "model": device.model or "formula",
        "device": device.device or "formula",
        "profile": device.profile or "no profile",
        "dtype": device.dtype,
        "kv_dtype": f"KV in {device.kv_dtype}" if device.kv_dtype else "KV as usual",
        "kv_dtype_skip_layers": f"KV of {', '.join(device.kv_dtype_skip_layers)} in floats"
        if device.kv_dtype_skip_layers
        else "KV alike",
        "quantization": f"weights in {device.quantization}" if device.quantization else "weights as published",
        "quantize_head": "head in codes" if device.quantize_head else "head as it is",
        "tensor_parallel": f"tensor parallel {device.tensor_parallel}",
        "memory_share": f"memory share {device.memory_share:g}",
        "faster": ", ".join(f"{name} × {getattr(device.faster, name):g}" for name in device.faster.__struct_fields__),
        "blocks": "blocks that fit" if scenario.blocks is None else f"{scenario.blocks:,} blocks",
        "block_size": f"block size {scenario.block_size}",
        "host_blocks": f"{scenario.host_blocks:,} host blocks",
        "caching": "prefix cache" if scenario.prefix_caching else "no prefix cache",
        "budget": "no budget" if budget is None else f"budget {budget:,}",
        "rows": f"{scenario.max_sequences:,} rows",
        "price": "no price" if scenario.price_per_hour is None else f"{scenario.price_per_hour:g} an hour",
        "seed": f"seed {load.seed}",
    }


def _tells_apart(key: str, facts: Sequence[Mapping[str, str]], policies: Sequence[str]) -> bool:
    """Whether a policy occurs with two values of the option. An option that differs between policies alone (their own budget) makes no setting."""
    pairs = {(policy, fact[key]) for policy, fact in zip(policies, facts)}
    return len(pairs) > len(set(policies))


def _joined(fact: Mapping[str, str], keys: Sequence[str]) -> str:
    return " · ".join(fact[key] for key in keys)


def _look(number: int) -> Look:
    lap, place = divmod(number, len(_COLOURS))
    return Look(_COLOURS[place], _DASHES[lap % len(_DASHES)], _SYMBOLS[(place + lap) % len(_SYMBOLS)])

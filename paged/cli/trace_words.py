"""A trace in sentences: its rate, its lengths, and what was left out."""

import math
from collections.abc import Sequence

from paged.cli.show import printed
from paged.study.simulator import Lengths, Scenario, TraceFacts
from paged.study.simulator.trace_facts import per_second


def described(load: TraceFacts, *, with_pace: bool = True) -> str:
    """Return a trace's requests, rate, lengths, what was left out, and what it is an excerpt of."""
    pace = ""
    if load.per_s and with_pace:
        pace = f" over {load.span_s:,.0f} s, {per_second(load.per_s)} requests/s"
    lengths = f"prompts {_lengths(load.prompts)}, outputs {_lengths(load.outputs)}"
    said = f"{load.name}: {load.requests:,} requests{pace}, {lengths}"
    return "; ".join(filter(None, (said, drawn(load), left_out(load), load.note)))


def drawn(load: TraceFacts) -> str:
    """Return that requests were drawn again because the trace is too short; "" if none were."""
    if load.drawn_from is None:
        return ""
    return f"drawn from its {load.drawn_from:,} requests, which end before this load has settled (--least-span 0: as it is)"


def unsettled(load: TraceFacts) -> str:
    """Return that a trace is too short for its load, and what to do; "" if it is long enough."""
    if not load.is_too_short:
        return ""
    return (
        f"the trace lasts {load.span_s:,.3g} s, and a service under such a load has settled after about {load.settles_in_s:,.3g} s: the figures "
        f"are of one that fills up; --least-span {load.settles_in_s:g} draws the trace longer from itself"
    )


def print_limits(scenarios: Sequence[Scenario], loads: Sequence[TraceFacts]) -> None:
    """Print the limits of scenarios' traces and devices, each sentence once; of the traces that are too short, only the shortest."""
    shortest = min(loads, key=lambda load: load.span_s / load.settles_in_s if load.settles_in_s else math.inf)
    if note := unsettled(shortest):
        printed(f"Note: {note}.")
    for note in dict.fromkeys(note for scenario in scenarios for note in scenario.device.notes()):
        printed(f"Note: {note}.")
    for each in dict.fromkeys(each for scenario in scenarios for each in scenario.device.not_modelled()):
        printed(f"Not modelled: {each}.")


def left_out(load: TraceFacts) -> str:
    """Return how many requests did not fit into the context; "" if all did."""
    if load.context is None or not (load.left_out or load.clipped):
        return ""
    became = f"{load.left_out:,} left out" if load.left_out else f"{load.clipped:,} clipped"
    return f"{became}, longer than the context of {load.context:,} tokens"


def over_budget(count: int, requests: int, policy: str, budget: int) -> str:
    """Return that `count` prompts are longer than the token budget of a policy that splits no prompt."""
    return (
        f"{policy} splits no prompt, and {count:,} of {requests:,} prompts are over its token budget of {budget:,}: each is computed "
        f"alone, over several steps, where the system itself would refuse it"
    )


def _lengths(tokens: Lengths) -> str:
    return f"{tokens.mean:,.0f} tokens on average (p99 {tokens.p99:,})"

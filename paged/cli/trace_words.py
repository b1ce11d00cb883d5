"""What a trace is, in a sentence: how fast, how long, what is not in it. Knows rounding. Does not know what became of it."""

from collections.abc import Sequence

from paged.cli.show import printed
from paged.simulator import Lengths, Scenario, TraceFacts
from paged.simulator.trace_facts import per_second


def described(load: TraceFacts, *, with_pace: bool = True) -> str:
    """Requests, rate, lengths, what was left out, what it is an excerpt of."""
    pace = ""
    if load.per_s and with_pace:
        pace = f" over {load.span_s:,.0f} s, {per_second(load.per_s)} requests/s"
    lengths = f"prompts {_lengths(load.prompts)}, outputs {_lengths(load.outputs)}"
    said = f"{load.name}: {load.requests:,} requests{pace}, {lengths}"
    return "; ".join(filter(None, (said, left_out(load), load.note)))


def print_limits(scenarios: Sequence[Scenario]) -> None:
    """What a reader of several scenarios' figures should know of their devices, each sentence once."""
    for note in dict.fromkeys(note for scenario in scenarios for note in scenario.device.notes()):
        printed(f"Note: {note}.")
    for each in dict.fromkeys(each for scenario in scenarios for each in scenario.device.not_modelled()):
        printed(f"Not modelled: {each}.")


def left_out(load: TraceFacts) -> str:
    """How many requests the context did not hold; nothing where it holds all."""
    if load.context is None or not (load.left_out or load.clipped):
        return ""
    became = f"{load.left_out:,} left out" if load.left_out else f"{load.clipped:,} clipped"
    return f"{became}, longer than the context of {load.context:,} tokens"


def over_budget(count: int, requests: int, policy: str, budget: int) -> str:
    """That a policy which splits no prompt meets some that are longer than its token budget."""
    return (
        f"{policy} splits no prompt, and {count:,} of {requests:,} prompts are over its token budget of {budget:,}: each is computed "
        f"alone, over several steps, where the system itself would refuse it"
    )


def _lengths(tokens: Lengths) -> str:
    return f"{tokens.mean:,.0f} tokens on average (p99 {tokens.p99:,})"

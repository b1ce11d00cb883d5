"""What a trace is, in a sentence: how fast, how long, what is not in it. Knows rounding. Does not know what became of it."""

from paged.cli.show import short
from paged.simulator import Lengths, TraceFacts


def described(load: TraceFacts, *, with_pace: bool = True) -> str:
    """Requests, rate, lengths, what was left out, what it is an excerpt of."""
    pace = ""
    if load.per_s and with_pace:
        pace = f" over {load.span_s:,.0f} s, {per_second(load.per_s)} requests/s"
    lengths = f"prompts {_lengths(load.prompts)}, outputs {_lengths(load.outputs)}"
    said = f"{load.name}: {load.requests:,} requests{pace}, {lengths}"
    return "; ".join(filter(None, (said, left_out(load), load.note)))


def per_second(rate: float) -> str:
    """A rate in three figures, also below 1."""
    return short(rate) if rate >= 1 else f"{rate:.3g}"


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

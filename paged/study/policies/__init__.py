"""Models of other systems, for comparison: static batches, Orca's regions, TGI's router. Importing this registers their policies."""

import math

from paged.base.arguments import is_number
from paged.errors import InvalidConfig
from paged.scheduler import Policy, Strategies, register_policy
from paged.scheduler.reservations import Totals, expected, most
from paged.study.policies.interleaving import Apart
from paged.study.policies.orca import InRegions, context, expected_pow2
from paged.study.policies.whole_batches import Lockstep, Longest, WholeBatches

__all__ = ["orca", "static", "tgi"]


def static(name: str, summary: str = "", *, is_padded: bool = False, reserves: bool = True) -> Policy:
    """Return a policy of whole batches in lockstep.

    is_padded  a batch begins with its longest prompt, as if shorter ones were padded, else with its shortest
    reserves   each row draws blocks for the longest of its batch, else only for the tokens it has
    """

    def strategies(policy: Policy, usual: Strategies, _: int) -> Strategies:
        if policy.foresight != "none":
            raise InvalidConfig(
                f"policy {policy.name}: foresight {policy.foresight} goes with requests that join at every step."
            )
        lockstep, longest = Lockstep(policy.name, is_padded=is_padded), Longest() if reserves else None
        return usual._replace(
            reservation=longest or usual.reservation,
            admission=WholeBatches(policy, lockstep, longest),
            composition=lockstep,
        )

    return Policy(
        name=name,
        summary=summary,
        reservation="max" if reserves else "prompt",
        composition="in_order",
        chunked=False,
        strategies=strategies,
    )


def orca(name: str, summary: str = "", *, total_of: Totals = most) -> Policy:
    """Return a policy of continuous batches in which each sequence reserves one region for `total_of` tokens."""

    def strategies(_: Policy, usual: Strategies, num_blocks: int) -> Strategies:
        return usual._replace(reservation=InRegions(total_of, num_blocks))

    return Policy(
        name=name,
        summary=summary,
        reservation="expected" if total_of in (expected, expected_pow2) else "max",
        layout="region",
        composition="in_order",
        chunked=False,
        strategies=strategies,
    )


def tgi(name: str, summary: str = "", *, ratio: float = 1.2, most_steps: int | None = 20) -> Policy:
    """Return a policy in which newcomers interrupt decoding when at least `ratio` times the running requests can enter together, or after
    `most_steps` decode steps (None: no such bound). Raises InvalidConfig."""
    if not is_number(ratio) or not 0 <= ratio < math.inf:
        raise InvalidConfig(f"ratio has to be a finite number of at least 0; got {ratio!r}.")
    if most_steps is not None and (type(most_steps) is not int or most_steps < 1):
        raise InvalidConfig(f"most_steps has to be at least 1, or None; got {most_steps!r}.")

    def strategies(policy: Policy, usual: Strategies, _: int) -> Strategies:
        return usual._replace(composition=Apart(policy, ratio=ratio, most_steps=most_steps))

    return Policy(
        name=name,
        summary=summary,
        reservation="max",
        composition="in_order",
        chunked=False,
        default_budget=4096,
        strategies=strategies,
    )


# fmt: off
for _policy in (
    static("static", "llama generate: a whole batch in lockstep, each row preallocated to the longest, until the last has ended"),
    orca("orca-max", "iteration-level batches; a contiguous region of the model's whole context each", total_of=context),
    orca("orca-pow2", "the same with the output's length rounded up to a power of two", total_of=expected_pow2),
    orca("orca-oracle", "the same with the output's length known before", total_of=expected),
    tgi("tgi", "prompt and max_tokens drawn at once; newcomers interrupt decoding when enough wait, or after 20 steps"),
):
    register_policy(_policy)
# fmt: on

"""`paged policies`: the named policies, a line each."""

import msgspec

from paged import POLICIES
from paged.cli.options import Json
from paged.cli.show import print_json, table


def policies(json: Json = False) -> None:
    """List the scheduling policies that --policy understands, and the tokens a step that each system uses by default.

    Example: `paged policies`
    """
    if json:
        named = [msgspec.structs.asdict(policy) for policy in POLICIES.values()]
        print_json([{field: value for field, value in policy.items() if field != "strategies"} for policy in named])
    else:
        rows = [
            [policy.name, f"{policy.default_budget:,}" if policy.default_budget else "–", policy.summary]
            for policy in POLICIES.values()
        ]
        table("policies", ["name", "its own budget", "what it does"], rows)

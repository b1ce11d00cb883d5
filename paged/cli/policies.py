"""`paged policies`: the named policies, a line each. Knows how they are listed, not what they do."""

from paged import POLICIES
from paged.cli.options import Json
from paged.cli.show import print_json, table


def policies(json: Json = False) -> None:
    """List the scheduling policies that --policy understands.

    Example: `paged policies`
    """
    if json:
        print_json(list(POLICIES.values()))
    else:
        table("policies", ["name", "what it does"], [[policy.name, policy.summary] for policy in POLICIES.values()])

"""The needed version of Ray. Imports Ray only on a call."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from paged.base.extras import installed_by
from paged.errors import UnsupportedRay

OLDEST = (2, 60)
"""The first version whose request routers and autoscaling policies have everything that we use."""


def must_fit() -> None:
    """Raise UnsupportedRay if Ray is missing or too old."""
    wanted = ".".join(map(str, OLDEST))
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise UnsupportedRay(f"replicas need Ray {wanted} or newer, and none is installed; {_help()}") from None
    numbers = tuple(int(each) for each in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST:
        raise UnsupportedRay(f"replicas need Ray {wanted} or newer, and {found} is installed; {_help()}")
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise UnsupportedRay(f"Ray {found} is installed without Ray Serve ({error}); {_help()}") from None


def _help() -> str:
    return f"{installed_by('ray')} brings it."

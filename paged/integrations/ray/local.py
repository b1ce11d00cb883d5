"""Replicas on this machine alone, on our own Ray, which begins and ends with the server.

The server's process listens and has the ingress; Ray's proxy and Ray's ingress are not started. Ray listens on loopback
alone, to clients with a token that is in no file. It sends no usage statistics, and has no dashboard.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Ray reads these on import. The last one makes a node's address 127.0.0.1, as on systems without Ray clusters.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
os.environ.update(_ENVIRONMENT)

from paged.integrations.ray.needed import must_fit  # noqa: E402

must_fit()

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.exceptions import RayError  # noqa: E402

from paged.errors import ServerFailed  # noqa: E402
from paged.integrations.ray.application import Replicas, must_be_carried, replicas_of  # noqa: E402
from paged.integrations.ray.ingress import Ingress, asking_of  # noqa: E402
from paged.model.threads import usable_cores  # noqa: E402
from paged.serving.settings import Settings  # noqa: E402

APP = "paged"
_STORE_BYTES = 100 * 2**20
"""Size of Ray's object store: processes exchange messages, which are far smaller."""


@contextmanager
def replicas(settings: Settings, num: int, **more: Any) -> Iterator[Ingress]:
    """Run so many replicas on their own Ray until the block ends, and return the ingress that sends calls to them; `more` are options of their
    deployment.

    Raises InvalidConfig and ServerFailed.
    """
    must_be_carried(settings)
    asking = asking_of(settings)
    # Ray's processes inherit it. Unset, Ray gives each replica as many threads as its nominal cores: one.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // num)))
    try:
        try:
            _begin(num)
        except (RayError, OSError, RuntimeError, ValueError) as error:
            raise ServerFailed(f"Ray did not begin: {error}") from error
        # A second try of the same engine would fail, too.
        options = {"max_constructor_retry_count": 1, "ray_actor_options": resources(num), **more}
        application = replicas_of(settings, Replicas(least=num, most=num), **options)
        try:
            handle = serve.run(application, name=APP, route_prefix=None)
        except RuntimeError:
            raise ServerFailed(f"the replicas did not begin: {_why()}") from None
        yield Ingress(settings, asking, handle)
    finally:
        # It ends all of its processes, and engines end with their replicas. Serve's own shutdown would wait for a dead Ray.
        ray.shutdown()


def _begin(num: int) -> None:
    """Start Ray, and Serve on it, for so many replicas. Raises what Ray raises."""
    ray.init(
        address="local",
        num_cpus=num,
        object_store_memory=_STORE_BYTES,
        include_dashboard=False,
        configure_logging=True,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")


def resources(num: int) -> dict[str, float]:
    """Return the resources of each of so many replicas: one nominal core, and an equal share of the GPUs that Ray found."""
    gpus = ray.cluster_resources().get("GPU", 0)
    return {"num_cpus": 1, **({"num_gpus": gpus // num or gpus / num} if gpus else {})}


def _why() -> str:
    """Return Ray's message on the deployment."""
    found = serve.status().applications[APP]
    said = [each.message for each in found.deployments.values() if each.message] or [found.message]
    # The last line of a traceback.
    return re.sub(r"^[\w.]+: ", "", said[0].strip().splitlines()[-1])

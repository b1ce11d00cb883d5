"""The application that Ray Serve runs: an ingress, and replicas behind it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from paged.errors import InvalidConfig
from paged.integrations.ray.replica import Replica
from paged.serving.engine_client import policies_of
from paged.serving.settings import Settings, read_settings

INGRESS, REPLICA = "Ingress", "Replica"
"""Names of the deployments, for their options in Ray's YAML."""
STATS_PERIOD_S = 1.0
_MOST_ONGOING = 100_000
"""Calls that Ray sends to a replica: above any limit of its gate, which answers the calls that it refuses."""
_PROXY = "Ray Serve's proxy listens, by its http_options"
_REFUSED = {
    "kv_events": "replicas publish theirs to their routers",
    **dict.fromkeys(("host", "port", "tls_certificate", "tls_key", "tls_client_ca"), _PROXY),
    **dict.fromkeys(("max_connections", "header_timeout_s", "keep_alive_s"), _PROXY),
}
"""Settings that Ray replaces, or that replicas cannot have, and why."""


class Replicas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of replicas, `least` to `most`, such that each has `load` requests, running and waiting."""

    least: Annotated[int, msgspec.Meta(ge=1)] = 1
    most: Annotated[int, msgspec.Meta(ge=1)] = 1
    load: Annotated[float, msgspec.Meta(gt=0)] = 64.0


def build(args: dict[str, Any]) -> serve.Application:
    """See `paged.integrations.ray.build`."""
    args = dict(args)
    config, engine = args.pop("config", None), args.pop("engine", {})
    replicas, ingresses = _replicas(args.pop("replicas", 1)), args.pop("ingresses", 1)
    if not isinstance(ingresses, int) or ingresses < 1:
        raise InvalidConfig(f"ingresses has to be an integer of at least 1; got {ingresses!r}.")
    settings = read_settings(None if config is None else Path(config), args, engine)
    must_be_carried(settings, _REFUSED)

    # Runs in the ingress's process.
    def ingress() -> Any:
        from paged.base.extras import leave_torch_out

        leave_torch_out()
        from ray import serve

        from paged.integrations.ray.ingress import Ingress, asking_of

        app_name = serve.get_replica_context().app_name
        handle = serve.get_deployment_handle(REPLICA, app_name)
        return Ingress(settings, asking_of(settings), handle, is_behind_ray=True)

    deployment = serve.deployment(name=INGRESS, num_replicas=ingresses, max_ongoing_requests=_MOST_ONGOING)
    return deployment(serve.ingress(ingress)()).bind(replicas_of(settings, replicas, ingresses))


def replicas_of(settings: Settings, replicas: Replicas, ingresses: int = 1, **more: Any) -> serve.Application:
    """Return the replicas alone, to which so many ingresses send calls; `more` are options of Ray's. Raises InvalidConfig."""
    must_be_carried(settings)
    router = RequestRouterConfig(
        request_router_class="paged.integrations.ray.router.PrefixRouter",
        request_router_kwargs={"num_untold": ingresses - 1},
        request_routing_stats_period_s=STATS_PERIOD_S,
    )
    options: dict[str, Any] = {
        "name": REPLICA,
        "num_replicas": replicas.least,
        "max_ongoing_requests": _MOST_ONGOING,
        "request_router_config": router,
        "health_check_period_s": 2.0,
        "graceful_shutdown_timeout_s": settings.shutdown_timeout_s,
    }
    if replicas.most > replicas.least:
        policy = AutoscalingPolicy(policy_function="paged.integrations.ray.scaling:by_load", policy_kwargs={})
        del options["num_replicas"]
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=replicas.least,
            max_replicas=replicas.most,
            target_ongoing_requests=replicas.load,
            policy=policy,
        )
    return serve.deployment(**{**options, **more})(Replica).bind(settings, policies_of())


def must_be_carried(settings: Settings, refused: Iterable[str] = ("kv_events",)) -> None:
    """Raise InvalidConfig for one of these settings, which replicas do not have, that differs from its default."""
    usual = Settings()
    for name in refused:
        if getattr(settings, name) != getattr(usual, name):
            raise InvalidConfig(f"{name} does not go with replicas: {_REFUSED[name]}.")


def _replicas(given: Any) -> Replicas:
    try:
        found = Replicas(least=given, most=given) if isinstance(given, int) else msgspec.convert(given, Replicas)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidConfig(f"replicas: {error}") from None
    if found.least < 1 or found.most < found.least:
        raise InvalidConfig(
            f"replicas: least has to be at least 1, and at most `most`; got {found.least} and {found.most}."
        )
    return found

"""Replicas of the server on Ray Serve, by Ray's public interface alone.

    client ──HTTP──> Ingress: keys, limits, tokens ──Ray's handle, with our router──> Replica: paths, gate ──> its engine process

`paged serve --replicas 2` runs it on one machine; on a cluster Ray Serve builds `paged.integrations.ray:build`
(docs/scaling.md). Needs the `ray` extra.
"""

from typing import Any

from paged.integrations.ray.needed import must_fit

__all__ = ["build"]


def build(args: dict[str, Any]) -> Any:
    """Build the application of a Ray Serve YAML.

    args  settings of a server by name, those of its engine in `engine`; `replicas`, a number, or an object with least, most and load; `ingresses`, the
          number of processes that take calls; `config`, a TOML file with settings

    Raises UnsupportedRay, InvalidConfig with the setting, and OSError if the file cannot be read.
    """
    must_fit()
    # Imported here, since `paged serve --replicas` first sets up its own Ray.
    from paged.integrations.ray.application import build as build_with_ray

    return build_with_ray(args)

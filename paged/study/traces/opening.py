"""Where a trace's name leads: to a file, to an excerpt that ships with the package, or to a generator."""

import difflib
import errno
from dataclasses import replace
from pathlib import Path

from paged.errors import InvalidConfig, InvalidSpec
from paged.study.traces.excerpts import EXCERPTS, excerpt_path
from paged.study.traces.formats import read_trace
from paged.study.traces.lengths import PRESETS
from paged.study.traces.spec import PREFIX, parsed_spec, unknown_lengths
from paged.study.traces.synthetic import synthetic
from paged.study.traces.trace import Trace


def open_trace(name: str, *, limit: int | None = None, seed: int = 0) -> Trace:
    """The trace in a file, an excerpt by its name, or a synthetic one by its description (`synthetic:…`); a file comes first.

    `limit` takes the first so many requests. `seed` chooses the prompts' tokens; and what a synthetic trace draws, where its description
    has no seed. Raises TraceError, InvalidSpec, InvalidConfig or OSError.
    """
    path, note = Path(name), ""
    if is_synthetic(name):
        trace = _made_up(name, seed)
        return trace if limit is None else trace.head(limit)
    if not _is_there(path):
        if name not in EXCERPTS:
            nearest = difflib.get_close_matches(name, EXCERPTS, n=1)
            hint = f'; did you mean "{nearest[0]}"?' if nearest else ""
            known = f"an excerpt that ships with paged ({', '.join(sorted(EXCERPTS))}), nor {PREFIX}…"
            raise FileNotFoundError(errno.ENOENT, f"no such file, nor {known}{hint}", name)
        path, note = excerpt_path(name), EXCERPTS[name].note
    return replace(read_trace(path, limit=limit, seed=seed), note=note)


def is_synthetic(name: str) -> bool:
    """Whether `open_trace` makes up what has this name."""
    return name.startswith(PREFIX) and not _is_there(Path(name))


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a description may be longer than the name of a file may be
        return False


def _made_up(spec: str, seed: int) -> Trace:
    arguments = parsed_spec(spec)
    lengths = arguments.get("lengths")
    if lengths is not None and lengths not in PRESETS:
        path = Path(lengths)
        if not _is_there(path):
            if lengths not in EXCERPTS:
                raise unknown_lengths(spec, lengths, EXCERPTS)
            path = excerpt_path(lengths)
        arguments["lengths"] = read_trace(path)
    try:
        return synthetic(**{"seed": seed, "name": spec, **arguments})
    except InvalidConfig as problem:
        raise InvalidSpec(spec, "", str(problem)) from None

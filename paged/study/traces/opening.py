"""Traces by name: a file, an excerpt of a published trace that ships with the package (see `data/README.md`), or a generator."""

import difflib
import errno
from dataclasses import replace
from pathlib import Path

import msgspec

from paged.errors import InvalidConfig, InvalidSpec
from paged.study.traces.formats import read_trace
from paged.study.traces.lengths import PRESETS
from paged.study.traces.spec import PREFIX, parsed_spec, unknown_lengths
from paged.study.traces.synthetic import synthetic
from paged.study.traces.trace import Trace


class Excerpt(msgspec.Struct, frozen=True):
    """Some requests of a published trace, unchanged and in order; `summary` says which.

    note  what was left out, for readers of figures
    """

    name: str
    file: str
    summary: str
    note: str
    source: str
    licence: str

    @property
    def path(self) -> Path:
        """The file of the excerpt."""
        return Path(__file__).parent / "data" / self.file


EXCERPTS = {
    "azure": Excerpt(
        name="azure",
        file="azure_conversation.csv",
        summary="the first 500 requests of a conversation service's hour, November 2023",
        note="excerpt: the first 500 of 19,366 requests",
        source="Microsoft, Azure Public Dataset (Splitwise, ISCA '24), github.com/Azure/AzurePublicDataset",
        licence="CC-BY 4.0",
    ),
    "mooncake": Excerpt(
        name="mooncake",
        file="mooncake_conversation.jsonl",
        summary="the first 300 requests with prompts of up to 4,096 tokens of a chat service's hour, with the prefixes they share",
        note="excerpt: 300 of 12,031 requests, the first with prompts of up to 4,096 tokens, as a third of all have",
        source="Moonshot AI, Mooncake (FAST '25), github.com/kvcache-ai/Mooncake",
        licence="Apache-2.0",
    ),
}


def open_trace(name: str, *, limit: int | None = None, seed: int = 0) -> Trace:
    """Open the trace in a file, an excerpt by its name, or a synthetic trace by its description (`synthetic:…`); a file comes first.

    `limit` takes the first requests. `seed` chooses the prompts' tokens, and the draws of a synthetic trace without a seed of its own. Raises
    TraceError, InvalidSpec, InvalidConfig or OSError.
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
        path, note = EXCERPTS[name].path, EXCERPTS[name].note
    return replace(read_trace(path, limit=limit, seed=seed), note=note)


def is_synthetic(name: str) -> bool:
    """Whether `open_trace` generates the trace of this name."""
    return name.startswith(PREFIX) and not _is_there(Path(name))


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a description may be too long for a file's name
        return False


def _made_up(spec: str, seed: int) -> Trace:
    arguments = parsed_spec(spec)
    lengths = arguments.get("lengths")
    if lengths is not None and lengths not in PRESETS:
        path = Path(lengths)
        if not _is_there(path):
            if lengths not in EXCERPTS:
                raise unknown_lengths(spec, lengths, EXCERPTS)
            path = EXCERPTS[lengths].path
        arguments["lengths"] = read_trace(path)
    try:
        return synthetic(**{"seed": seed, "name": spec, **arguments})
    except InvalidConfig as problem:
        raise InvalidSpec(spec, "", str(problem)) from None

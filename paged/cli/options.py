"""Options of the commands."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from typer import Option

from paged.base.extras import import_with_extra
from paged.base.whole_file import writable
from paged.cli.commands import declared
from paged.errors import InvalidConfig

T = TypeVar("T")

TRACE, DEVICE, OUT = "The trace", "Model and device", "Output"
VIOLATIONS_FOUND = 1
TARGETS_MISSED = 1
CORES = os.cpu_count() or 1


# fmt: off
Quantization = Annotated[str | None, declared("quantization", DEVICE)]
QuantizeHead = Annotated[bool, declared("quantize_head", DEVICE)]
KvDtype = Annotated[str | None, Option(help="Dtype of K and V; int8 and int4 with a scale for each token and head.", show_default="as --dtype; bf16 where that has 8 bits", rich_help_panel=DEVICE)]
KvDtypeSkipLayers = Annotated[str | None, Option("--kv-dtype-skip-layers", metavar="LAYERS", help="Layers whose K and V stay in --dtype beside others in int8 or int4: sliding_window, chunk.", show_default="none", rich_help_panel=DEVICE)]
LinkGbps = Annotated[float | None, Option("--link-gbps", metavar="GB/S", help="Gigabytes a second of the link between devices, one way.", show_default="as measured, or by the device's sheet (docs/hardware.md)", rich_help_panel=DEVICE)]
LinkUs = Annotated[float | None, Option("--link-us", metavar="µS", help="Microseconds of a message on that link beside its bytes.", show_default="as measured; PCIe 12, NVLink 5", rich_help_panel=DEVICE)]
MemoryShare = Annotated[float, Option(help="Share of the device's memory that may be used.", rich_help_panel=DEVICE)]
Check = Annotated[bool, Option("--check", help="Recompute every invariant before and after each update (slow); status 1 if one is violated.")]
Jobs = Annotated[int, Option(min=1, help="Processes for several simulations.", show_default="all cores")]
HtmlPath = Annotated[Path | None, Option("--html", help="Also write a report with plots, one file that loads nothing else.", rich_help_panel=OUT)]
Json = Annotated[bool, Option("--json", help="One JSON document on standard output, and nothing else there.")]
# fmt: on


def listed(text: str, what: str, kind: Callable[[str], T]) -> list[T]:
    """Return the values between commas. Raises InvalidConfig, which names the wrong part and the right kind."""
    parts = []
    for part in text.split(","):
        try:
            parts.append(kind(part.strip()))
        except ValueError:
            several = ", or several with commas between" if "," not in text else " between commas"
            raise InvalidConfig(f'{what} takes {_KINDS[kind]}{several}; got "{part.strip()}"') from None
    return parts


def chosen(text: str, what: str, known: Collection[str]) -> list[str]:
    """Return the values between commas, each once. Raises InvalidConfig for an unknown one."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [each for each in found if each not in known]:
        raise InvalidConfig(f'{what} takes {", ".join(known)}, or several with commas between; got "{unknown[0]}"')
    return found


def names_in(text: str | None) -> tuple[str, ...]:
    """Return the names between commas."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(","))) if text else ()


def count(text: str) -> int:
    """Return a whole number of at least 1. Raises ValueError."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def budget(text: str) -> int | Literal["auto", "knee", "own"]:
    """Return a token budget. Raises ValueError."""
    return text if text in ("auto", "knee", "own") else count(text)  # type: ignore[return-value]


_KINDS: dict[Callable[[str], object], str] = {
    float: "a number",
    count: "a whole number of at least 1",
    budget: "a whole number of at least 1, auto, knee or own",
}


def check_outputs(written: Mapping[str, Path | None], read: Iterable[str | Path | None] = ()) -> None:
    """Check an option's file before a long run. Raises InvalidConfig for the file of another option, or one that is `read`; UnwritablePath;
    and MissingExtra for plots that cannot be drawn."""
    names = {os.path.realpath(path): "" for path in read if path and Path(path).exists()}
    for option, path in written.items():
        if path is None:
            continue
        writable(path)
        other = names.setdefault(os.path.realpath(path), option)
        if not other:
            raise InvalidConfig(f"{option} would overwrite {path}, which is read; give it another file")
        if other is not option:
            raise InvalidConfig(f"{other} and {option} are both {path}; give each a file of its own")
    if written.get("--html") is not None:
        import_with_extra("plotly", "study.report")

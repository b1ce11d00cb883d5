"""The changes to a trace since it was read or generated, for reports."""

import msgspec


class Applied(msgspec.Struct, frozen=True):
    """One transformation: its name, its arguments, how many requests came in and went out, and how many of them it changed or
    left out, by what became of them (`clipped`, `rejected`)."""

    name: str
    arguments: dict[str, float | int | str]
    requests_before: int
    requests_after: int
    counts: dict[str, int] = {}

    def __str__(self) -> str:
        arguments = ", ".join(f"{key}={_shown(value)}" for key, value in self.arguments.items())
        counts = "".join(f", {count:,} {what}" for what, count in self.counts.items())
        return f"{self.name}({arguments}): {self.requests_after:,} of {self.requests_before:,} requests{counts}"


def _shown(value: float | int | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

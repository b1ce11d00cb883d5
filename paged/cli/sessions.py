"""`paged sessions`: recorded sessions of agents, replayed on the real scheduler: what each way to keep content between turns saves."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Annotated

import msgspec
from typer import Argument, Exit, Option

from paged import LayerGroup
from paged.base.words import counted
from paged.cli.options import VIOLATIONS_FOUND, Check, Json, check_outputs, chosen
from paged.cli.show import as_time, print_json, printed, say, table
from paged.study.hardware import device_names, model_names
from paged.study.report import write_sessions_html
from paged.study.simulator import KEEPS, TURN_GROUPS, Device, SessionResult, SessionRun, Tiers
from paged.study.traces import SESSIONS_EXCERPT, draw_sessions, open_sessions

_TIERS = Tiers(device_blocks=2)
_MEMORY_SHARE = 0.9
_ALL = ",".join(KEEPS)


def sessions(
    file: Annotated[str, Argument(metavar="FILE", help=f"A recording of sessions, JSON Lines (docs/sessions.md); or {SESSIONS_EXCERPT.name}: {SESSIONS_EXCERPT.summary}.")] = SESSIONS_EXCERPT.name,
    keeps: Annotated[str, Option(metavar="KEEPS[,…]", help="Ways to keep content: lru (by use alone), sessions (by each request's session_id), hints (retain at a turn's end, end at a session's).")] = _ALL,
    count: Annotated[int | None, Option(min=1, help="Number of sessions to draw.", show_default="all")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the sessions that are drawn, and of when they begin.")] = 0,
    spread: Annotated[float, Option(min=0, metavar="S", help="Sessions begin at random within so many seconds.")] = 1800.0,
    longest_pause: Annotated[float, Option(min=0, metavar="S", help="Longest pause; longer ones are cut to it.")] = 1800.0,
    until: Annotated[float | None, Option(metavar="S", help="End after so many virtual seconds.", show_default="to the end")] = None,
    bounds: Annotated[bool, Option("--bounds", help="Turns begin as in the recording, and nothing takes time: the effect of the order of eviction alone.")] = False,
    model: Annotated[str, Option(help=f"{', '.join(model_names())}; or a JSON file.")] = "llama-3.1-8b",
    device: Annotated[str, Option("--device", help=f"{', '.join(device_names())}; or a JSON file.")] = "h100",
    blocks: Annotated[int | None, Option(min=2, help="Device blocks, of as many tokens as the recording's; pages where the model's layers are of several kinds.", show_default="what the device has left")] = None,
    host_blocks: Annotated[int, Option(min=0, help="Host blocks, for content that leaves the device.")] = 0,
    host_us: Annotated[float, Option(min=0, metavar="µS", help="Latency of a step's copies between device and host; their rate is the device's.")] = _TIERS.host_latency_s * 1e6,
    disk_blocks: Annotated[int, Option(min=0, help="Blocks on a disk, which keeps computed content; 0: no disk.")] = 0,
    disk_gbps: Annotated[float, Option(metavar="GB/S", help="Gigabytes a second that the disk reads.")] = _TIERS.disk_bytes_per_s / 1e9,
    disk_us: Annotated[float, Option(min=0, metavar="µS", help="Latency of a read.")] = _TIERS.disk_latency_s * 1e6,
    policy: Annotated[str, Option("--policy", metavar="POLICY", help="`paged policies` lists them.")] = "paged",
    max_tokens_per_step: Annotated[int, Option("--max-tokens-per-step", min=1, help="Token budget of a step.")] = 8192,
    max_sequences: Annotated[int, Option(min=1, help="Sequences in a step.")] = 64,
    check: Check = False,
    html: Annotated[Path | None, Option("--html", help="Also write a page with plots.", show_default="none")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Replay recorded sessions through the real memory manager and scheduler, and show the hits of each way to keep content between turns.

    A closed loop on a virtual clock: a turn begins a recorded pause after the last one ended; sub-agents run beside their parent. Shares
    are of the prompts' full blocks. "kept" is the share if nothing were evicted. "offline" is that of an order that knows when each turn comes,
    and keeps one prompt a session: with sub-agents it is no bound (docs/sessions.md).

    Example: `paged sessions agents --blocks 2000 --host-blocks 8000`
    """
    ways = chosen(keeps, "--keeps", KEEPS)
    check_outputs({"--html": html}, [file])
    begun = draw_sessions(open_sessions(file), count, random.Random(seed), spread_s=spread)
    on = Device(model=model, device=device)
    roofline = on.roofline()
    assert roofline is not None, "a model and a device are named"
    size = begun[0].session.block_size
    groups = on.groups(size)
    if blocks is None:
        blocks = roofline.num_blocks(
            size, _MEMORY_SHARE, max_tokens_per_step=max_tokens_per_step, max_sequences=max_sequences
        )
    tiers = Tiers(
        device_blocks=blocks,
        host_blocks=host_blocks,
        disk_blocks=disk_blocks,
        host_latency_s=host_us / 1e6,
        disk_latency_s=disk_us / 1e6,
        disk_bytes_per_s=disk_gbps * 1e9,
    )
    found = [
        SessionRun(
            begun,
            tiers,
            None if bounds else on.cost_model(),
            keeps=way,  # type: ignore[arg-type]
            longest_pause_s=longest_pause,
            until_s=math.inf if until is None else until,
            token_bytes=roofline.kv_bytes_per_token,
            policy=policy,
            max_tokens_per_step=max_tokens_per_step,
            max_sequences=max_sequences,
            check=check,
            groups=groups,
        ).run()
        for way in ways
    ]
    if html is not None:
        write_sessions_html(html, found)
    if json:
        print_json([{**msgspec.to_builtins(each), "hit": each.hit} for each in found])
    else:
        _show(found, tiers, size, "blocks" if [*groups] == [LayerGroup("full")] else "pages", has_times=not bounds)
        if html is not None:
            printed(f"Plots: {html}")
    if violated := [each for each in found if each.violations]:
        say(f"{sum(each.violations for each in violated)} violations; the first: {violated[0].violation}")
        raise Exit(VIOLATIONS_FOUND)


def _show(found: list[SessionResult], tiers: Tiers, size: int, unit: str, *, has_times: bool) -> None:
    columns = ["keeps", "hit", "device", "host", "disk", "kept", "offline", "computed twice"]
    rows = [
        [
            each.keeps,
            *(f"{share:.3f}" for share in (each.hit, each.device, each.host, each.disk, each.kept, each.offline)),
            f"{each.computed_twice:,}",
        ]
        for each in found
    ]
    if has_times:
        columns += ["TTFT p50", "p90", *(f"p90 of {_turns(*group)}" for group in TURN_GROUPS)]
        for row, each in zip(rows, found, strict=True):
            times = [each.ttft_s.p50, each.ttft_s.p90, *(group.p90 for group in each.ttft_by_turn)]
            row += [as_time(time) for time in times]
    first = found[0]
    title = f"{counted(first.sessions, 'session')}, {counted(first.turns, 'turn')}"
    table(title, columns, rows, right=range(1, len(columns)))
    printed(f"{title}, {counted(first.prompt_blocks, 'block')} of {size} tokens in their prompts.")
    if first.shortened:
        printed(
            f"Note: {first.shortened:,} of the prompts did not fit into {tiers.device_blocks:,} {unit}; their ends were left out, and count as missed: "
            f"{first.reachable:.3f} can hit at most."
        )


def _turns(first: float, last: float) -> str:
    return f"turn {first:g}" if first == last else f"{first:g} to {last:g}" if last < math.inf else f"{first:g} on"

"""`paged demo`: a real service's requests on a memory far too small, answered live by a model; then the same with ample memory.

In its second half the model is a hybrid, with states beside K and V in pages of one pool; then each request runs alone.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from paged.base.extras import has_extra, installed_by
from paged.cli.options import VIOLATIONS_FOUND, Json
from paged.cli.show import at_work, console, figures, print_json, printed
from paged.cli.summary import print_summary
from paged.cli.view import Frame, Watch, render
from paged.study.simulator import Load, Scenario, Simulation, SimulationResult

if TYPE_CHECKING:
    from paged.cli.demo_model import ModelRun

TITLE = "paged demo · a chat service on far too small a memory"
AMPLE_TITLE = "paged demo · the same requests with ample memory"
HYBRID_TITLE = "paged demo · a hybrid: states and attention in pages of one pool"
ALONE_TITLE = "paged demo · its requests, each alone"
REQUESTS = 160
RATE_SCALE = 64
STEPS_PER_SECOND = 28.0
FRAMES_PER_SECOND = 28.0
OUTPUTS_DIFFER = 1

# Without a model lengths are longer; the model that ships was trained on short ones.
STAND_IN = Scenario(
    load=Load(trace="mooncake", limit=REQUESTS, rate=RATE_SCALE, prompts=1 / 8, outputs=1 / 4),
    blocks=228,
    host_blocks=24,
    max_tokens_per_step=256,
    max_sequences=32,
)
WITH_MODEL = Scenario(
    load=Load(trace="mooncake", limit=REQUESTS, rate=RATE_SCALE, prompts=1 / 48, outputs=1 / 8),
    blocks=96,
    block_size=8,
    host_blocks=12,
    max_tokens_per_step=64,
    max_sequences=24,
)
AMPLE_BLOCKS = 4000
# A block of the hybrid is two pages, a state one; a page has a quarter of the bytes of a block above. Prompts are longer, and share more.
HYBRID = msgspec.structs.replace(
    WITH_MODEL, load=msgspec.structs.replace(WITH_MODEL.load, limit=48, prompts=1 / 16), blocks=200, host_blocks=0
)
ALONE = msgspec.structs.replace(HYBRID, blocks=AMPLE_BLOCKS, max_sequences=1, prefix_caching=False)


def demo(
    speed: Annotated[float, typer.Option(min=0.1, max=1000, help="Speed of the picture in a terminal, a factor.")] = 1.0,
    json: Json = False,
) -> None:  # fmt: skip
    """Watch a real service's requests press on a memory that is far too small for them, while a model answers them.

    160 requests of Mooncake's published conversation trace arrive 64 times as fast, with lengths scaled to the small model that ships: prompts of
    real text, 96 blocks of 8 tokens and 12 more on the host. Every block is a cell: one request's (in its colour), shared, cached or free; the
    texts below are being written. Every invariant is recomputed before and after each update. Then the same requests run with ample memory, and
    every answer has to be the same, token by token.

    In the second half the first 48 of them, with longer prompts, press on a hybrid model: two of its four layers are short convolutions, which
    keep a state, and 200 pages serve both kinds. A prompt that begins as an earlier one continues from a kept state. Every answer has to be that
    of the request alone. It takes about a minute and a half. Without torch (the extra `engine`) a stand-in answers, and nothing is compared.

    Example: `paged demo --speed 2`
    """
    if not has_extra("engine"):
        if not json:
            printed(f"What runs a model is not installed, so a stand-in answers; {installed_by('engine')} brings it.")
        simulation = STAND_IN.simulation(check=True)
        _run(simulation, TITLE, speed, json, {})
        result = simulation.result()
        _show(result, {}, json)
        raise typer.Exit(VIOLATIONS_FOUND if result.violations else 0)
    result, more = _model_demo(speed, json)
    try:
        its_result, hybrid = _hybrid_demo(speed, json)
    except KeyboardInterrupt:
        _show(result, more, json)
        raise
    _show(result, {**more, "hybrid": hybrid}, json)
    if result.violations or its_result.violations:
        raise typer.Exit(VIOLATIONS_FOUND)
    if more["different_outputs"] or hybrid["different_outputs"]:
        raise typer.Exit(OUTPUTS_DIFFER)


def _model_demo(speed: float, is_silent: bool) -> tuple[SimulationResult, dict[str, Any]]:
    """Run the simulation under pressure, and compare it with one in ample memory."""
    with at_work("reading the model: a few seconds; the first time up to a minute", is_silent):
        from paged.cli.demo_model import alike
        from paged.model.checkpoint import checkpoint_path

        ample_memory = msgspec.structs.replace(WITH_MODEL, blocks=AMPLE_BLOCKS, host_blocks=0)
        tight, ample = alike(checkpoint_path(), [WITH_MODEL, ample_memory])
    _run(tight.simulation, TITLE, speed, is_silent, tight.answers.texts)
    result = tight.simulation.result()
    try:
        _run(ample.simulation, AMPLE_TITLE, 1000.0, is_silent, ample.answers.texts)
    except KeyboardInterrupt:
        _show(result, {}, is_silent)
        raise
    preemptions = ample.simulation.result().preemptions
    return result, {
        "model": "the checkpoint that ships with paged",
        "ample_preemptions": preemptions.recompute + preemptions.swap,
        **_compared(tight, ample),
    }


def _hybrid_demo(speed: float, is_silent: bool) -> tuple[SimulationResult, dict[str, Any]]:
    """Run the hybrid's simulation under pressure, and compare it with each request alone."""
    with at_work("reading the hybrid", is_silent):
        from paged.cli.demo_model import alike
        from paged.model.checkpoint import hybrid_path

        tight, alone = alike(hybrid_path(), [HYBRID, ALONE], unchecked=[ALONE])
    _run(tight.simulation, HYBRID_TITLE, speed, is_silent, tight.answers.texts)
    _run(alone.simulation, ALONE_TITLE, 1000.0, is_silent, alone.answers.texts)
    result, found = tight.simulation.result(), tight.answers.found
    return result, {
        "finished": result.finished,
        "violations": result.violations,
        "checked_steps": result.checked_steps,
        "pages": result.num_blocks,
        "pages_each": {group.kind: group.pages for group in tight.simulation.scheduler.manager.layout.groups},
        "preemptions": result.preemptions.recompute,
        "hits": sum(length > 0 for length in found.values()),
        "hit_tokens": sum(found.values()),
        **_compared(tight, alone),
    }


def _compared(run: "ModelRun", other: "ModelRun") -> dict[str, Any]:
    tokens, expected, seconds = run.answers.tokens, other.answers.tokens, run.answers.seconds
    num_tokens = sum(map(len, tokens.values()))
    return {
        "different_outputs": sum(tokens[id] != expected[id] for id in expected),
        "model_s": seconds,
        "tokens_per_s": num_tokens / seconds if seconds else 0.0,
    }


def _run(simulation: Simulation, title: str, speed: float, is_silent: bool, texts: Mapping[str, str]) -> None:
    out = console()
    if is_silent:
        for _ in simulation.steps():
            pass
    elif out.is_terminal:
        _play(simulation, out, title, speed, texts)
    else:
        _report(simulation, title)


def _show(result: SimulationResult, more: dict[str, Any], json: bool) -> None:
    if json:
        print_json({**msgspec.to_builtins(result), **more})
        return
    if more:
        # Measured figures come before simulated ones.
        _figures("the model, here", more, f"{result.finished:,} answers under pressure and with ample memory")
    if hybrid := more.get("hybrid"):
        each = ", ".join(
            f"{pages} a {'state' if kind == 'state' else 'block'}" for kind, pages in hybrid["pages_each"].items()
        )
        _figures(
            "the hybrid, here",
            hybrid,
            f"{hybrid['finished']:,} answers under pressure and alone",
            ("one pool", f"{hybrid['pages']:,} pages, {each}"),
            ("preempted", f"{hybrid['preemptions']:,} times"),
            (
                "begun at a kept state",
                f"{hybrid['hits']:,} requests, {hybrid['hit_tokens']:,} tokens not computed again",
            ),
            ("invariants", f"{hybrid['violations']:,} violations in {hybrid['checked_steps']:,} checked steps"),
        )
    print_summary(result)


def _figures(title: str, of: dict[str, Any], compared: str, *more: tuple[str, str]) -> None:
    throughput = f"{of['tokens_per_s']:,.0f} output tokens/s, in {of['model_s']:.1f} s of computing"
    different = f"{of['different_outputs']:,} of {compared}"
    figures(title, [("real throughput", throughput), ("different answers", different), *more])


def _play(simulation: Simulation, out: Console, title: str, speed: float, texts: Mapping[str, str]) -> None:
    """Draw the simulation step by step at a steady pace. The last frame stays."""
    watch = Watch(simulation, texts)
    due = time.monotonic()
    next_frame = due
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        for step in simulation.steps():
            watch.note_step(step)
            due += 1 / (STEPS_PER_SECOND * speed)
            now = time.monotonic()
            if now >= next_frame:
                live.update(_drawn(watch.frame(), title, out), refresh=True)
                next_frame = now + 1 / FRAMES_PER_SECOND
            time.sleep(max(due - time.monotonic(), 0))
        live.update(_drawn(watch.frame(), title, out), refresh=True)


def _drawn(frame: Frame, title: str, out: Console):
    # One line less than the terminal has: a full one would scroll.
    return render(frame, title, out.width, out.height - 1)


def _report(simulation: Simulation, title: str) -> None:
    """Print a line whenever another tenth of the requests has ended."""
    watch = Watch(simulation)
    printed(title)
    tenths = 0
    for step in simulation.steps():
        watch.note_step(step)
        counts = simulation.scheduler.counts()
        ended = counts["finished"] + counts["rejected"]
        if ended * 10 // len(simulation.trace) > tenths:
            tenths = ended * 10 // len(simulation.trace)
            printed(progress_line(watch.frame()))


def progress_line(frame: Frame) -> str:
    """Return a frame in one line."""
    states = "  ".join(
        f"{state} {frame.counts.get(state, 0):3}" for state in ("waiting", "running", "paused", "swapped", "finished")
    )
    memory, totals = frame.memory, frame.totals
    blocks = f"{memory.used:3} of {len(frame.cells)} blocks used, {memory.cached:3} cached"
    preempted = f"preempted {totals.preemptions_recompute:2} by recompute, {totals.preemptions_swap:2} by swap"
    if memory.groups:
        held = ", ".join(f"{each.group.kind} {each.used:3}" for each in memory.groups)
        blocks = f"{memory.used:3} of {len(frame.cells)} pages used: {held}; {memory.cached:3} cached"
    return f"step {frame.step:5,}  {frame.now_s:6.2f} s  {blocks}  {states}  {preempted}  hits {totals.hit_tokens:6,} tokens"

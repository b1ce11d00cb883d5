"""The live view: what a frame says about each block, and that it fits the terminal it is drawn in."""

import numpy as np
import pytest
from rich.console import Console

from paged.cli.view import PALETTE, colour_of, render
from paged.cli.watch import Frame
from paged.serving.block_map import CACHED, FREE, SHARED


def frame_of(cells, **changes):
    fields = {
        "step": 412, "now_s": 37.25, "cells": np.asarray(cells, np.int64), "block_size": 16, "used": 4, "cached": 1,
        "free": 1, "host_blocks": 8, "host_used": 2, "host_cached": 1, "requests": 160,
        "counts": {"waiting": 21, "running": 9, "paused": 2, "swapped": 3, "finished": 57, "rejected": 0},
        "batch_tokens": 96, "batch_sequences": 9, "token_budget": 256, "preemptions_recompute": 14,
        "preemptions_swap": 22, "hit_tokens": 12_032, "prompt_tokens": 60_230,
        "events": tuple((float(i), i, f"event {i} {'with many words ' * 12}") for i in range(40)),
    }  # fmt: skip
    return Frame(**(fields | changes))


def drawn(frame, width=80, height=24, colour=False):
    console = Console(width=width, height=height, force_terminal=colour, color_system="truecolor" if colour else None)
    with console.capture() as capture:
        console.print(render(frame, "a title", width, height))
    return capture.get().rstrip("\n").split("\n")


def test_every_block_is_drawn_once_with_its_sign_and_neighbouring_requests_have_different_colours():
    assert drawn(frame_of([SHARED, 7, 8, 8, CACHED, FREE]))[2].strip("│ ") == "▓▓██████▒▒·"
    text = "".join(drawn(frame_of([3, 4] + [FREE] * 4), colour=True))
    for request in (3, 4):
        red, green, blue = (int(colour_of(request)[i : i + 2], 16) for i in (1, 3, 5))
        assert f"{red};{green};{blue}m██" in text
    assert len(set(PALETTE)) == len(PALETTE) and colour_of(3) != colour_of(4)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (100, 30), (200, 60), (60, 20)])
@pytest.mark.parametrize("num_blocks", [6, 228, 1000, 50_000])
def test_a_frame_fits_its_terminal(width, height, num_blocks):
    lines = drawn(frame_of(np.arange(num_blocks) % 40), width, height)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width


COUNTS = [
    "waiting 21", "running 9", "paused 2", "swapped 3", "57 of 160 requests ended", "14 by recompute", "22 by swap",
    "12,032 of 60,230",
]  # fmt: skip


def test_the_counts_are_on_the_screen_and_the_latest_events_last():
    lines = drawn(frame_of([FREE] * 228), width=100, height=30)
    text = "\n".join(lines)
    assert [figure for figure in COUNTS if figure not in text] == []
    assert "event 39" in lines[-1] and "event 38" in lines[-2]
    # Without a host tier there is no bar of it.
    hosts = [[line.strip("│ ")[:5] for line in drawn(frame_of([FREE] * 6, host_blocks=host))] for host in (8, 0)]
    assert ["host " in each for each in hosts] == [True, False]

"""The example of agents that pause, against a server whose pool is too small for them."""

import asyncio

from ..serving.serving_process import served  # noqa: TID252


def test_hints_keep_what_agents_come_back_for(example, capsys):
    with served(blocks=220, max_num_seqs=8) as server:
        shares = asyncio.run(example("agent").main(f"{server.url}/v1"))
    assert shares["with hints"] > shares["without hints"]
    without, with_hints = capsys.readouterr().out.splitlines()
    assert without.startswith("without hints  TTFT of later turns")
    assert with_hints.startswith("with hints     TTFT of later turns")

"""The host tier in vLLM: the copies of a step reach the worker with it, and every token that a row attends to lies where it should."""

import random
from types import SimpleNamespace

import pytest
import torch
from integrations.plugged import Runner
from integrations.vllm_things import answer, asked_tier, plug_in, request

from paged.integrations.vllm.host_tier import HostTier

BLOCK_SIZE = 2


@pytest.mark.parametrize("seed", range(6))
def test_what_rows_attend_to_is_where_it_should_be(seed):
    chance = random.Random(seed)
    num_blocks, host_blocks = 9, 12
    options = {"paged": {"costs": {"seconds_per_swapped_block": 1e-9}}}
    given = {"kv_transfer_config": asked_tier(host_blocks), "additional_config": options}
    core = plug_in(num_blocks, BLOCK_SIZE, max_num_batched_tokens=16, **given)
    # Halves of a block are what the kernels of this layer count.
    cache = torch.zeros((num_blocks + 1) * 2, BLOCK_SIZE // 2, dtype=torch.int64)
    slots = cache.view(-1)
    # The worker's side.
    tier = HostTier(SimpleNamespace(**given), None, SimpleNamespace(num_blocks=num_blocks + 1))
    tier.register_kv_caches({"layer": cache, "layer that shares it": cache})
    runner = Runner(BLOCK_SIZE)
    for k in range(14):
        core.add_request(request(f"r{k}", [chance.randrange(3) for _ in range(chance.randint(1, 9))], most=9))
    for _ in range(400):
        if not core.get_num_unfinished_requests():
            break
        output = core.schedule()
        tier.handle_preemptions(output.kv_connector_metadata)
        for copy in output.kv_cache_block_copies or ():
            slots.view(-1, BLOCK_SIZE)[copy.dst_block_id] = slots.view(-1, BLOCK_SIZE)[copy.src_block_id]
        batch = core._out[-1][1]
        shares = runner.run(output, batch)
        for tokens, _, written in shares.values():
            slots[torch.tensor(written) + BLOCK_SIZE] = torch.tensor(tokens) + 1
        for id, (_, positions, _) in shares.items():
            known = runner.known[id]
            for position in range(positions[-1] + 1):
                held = int(slots[known.tables[0][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE])
                assert held == (known.prompt + known.outputs)[position] + 1, (id, position)
        rows = zip(batch.ids.tolist(), batch.samples.tolist())
        sampled = {id: [chance.randrange(3)] for id, samples in rows if samples}
        runner.sampled(batch, sampled)
        core.update_from_output(output, answer(output, sampled))
        assert core.check() == []
    assert core.get_num_unfinished_requests() == 0
    assert core.manager.device.num_used == 0
    assert core.decisions.stats().swapped_in_blocks > 0


def test_without_it_no_step_has_copies_and_with_it_a_paused_one_says_that_it_has_none():
    core = plug_in()
    core.add_request(request("r", [1, 2]))
    assert core.schedule().kv_connector_metadata is None
    assert core.manager.num_host_blocks == 0
    moves = plug_in(kv_transfer_config=asked_tier(3)).schedule().kv_connector_metadata
    assert len(moves.device_to_host) == len(moves.host_to_device) == 0

"""Models whose layers are of several kinds: vLLM's groups as ours, and what its runner has of each of them."""

import random
from types import SimpleNamespace

import pytest
from integrations.plugged import Runner
from integrations.vllm_things import answer, core_of, memory, plug_in, request, spec, step

from paged import LayerGroup
from paged.integrations.vllm.groups import Part, groups_of

FULL, WINDOW, CHUNK = "FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"
STATE = spec("MambaSpec", 99)
STATE_AT = -1


def full(block_size=2):
    return spec(FULL, block_size)


def window(reach, block_size=2, **given):
    return spec(WINDOW, block_size, sliding_window=reach, **given)


def chunk(reach, block_size=2):
    return spec(CHUNK, block_size, attention_chunk_size=reach)


def test_groups_of_one_kind_and_reach_share_blocks_of_several_pages():
    found = groups_of(memory(9, window(4), full(), window(4), window(6), STATE, STATE))
    assert found.layers == (
        LayerGroup("window", 4, 2), LayerGroup("full"), LayerGroup("window", 6), LayerGroup("state", pages=2),
    )  # fmt: skip
    assert [part[:3] for part in found.parts] == [(0, 0, 1), (1, 0, 1), (0, 1, 1), (2, 0, 1), (3, 0, 1), (3, 1, 1)]
    assert (found.block_size, found.is_plain) == (2, False)


@pytest.mark.parametrize(
    ("specs", "size", "pages"),
    [
        # A smaller block is a page more, and a state says nothing of the size.
        ([full(32), window(64, 16), chunk(64, 8)], 32, [1, 2, 4]),
        ([full(4), window(8, 6)], 12, [3, 2]),
        ([full(), STATE], 2, [1, 1]),
        ([STATE], 16, [1]),
    ],
)
def test_a_block_is_as_large_as_the_blocks_of_all_groups_together_have_it(specs, size, pages):
    found = groups_of(memory(9, *specs))
    assert (found.block_size, [group.pages for group in found.layers]) == (size, pages)
    assert found.parts == tuple(
        Part(place, 0, each, its is STATE) for place, (each, its) in enumerate(zip(pages, specs))
    )


def test_layers_that_keep_all_tokens_are_plain_whatever_they_attend_to_and_drafts_lengthen_a_window():
    # The second as vLLM has it with --disable-hybrid-kv-cache-manager.
    for each in (full(), spec(FULL, 2, sliding_window=4), spec("MLAAttentionSpec", 2)):
        assert groups_of(memory(9, each)).is_plain
    assert not groups_of(memory(9, full(), full())).is_plain
    assert groups_of(memory(9, window(4, extra_retained_tokens=2))).layers == (LayerGroup("window", 6),)


def test_no_block_behind_the_longest_sequence_is_told():
    sizes = {"num_blocks": 20, "block_size": 12, "max_model_len": 14}
    core = core_of(request("a", list(range(10)), most=4), specs=[full(4), window(12, 6)], **sizes)
    (new,) = step(core)[0].scheduled_new_reqs
    assert [len(table) for table in new.block_ids] == [3, 2]
    more = [step(core)[0].scheduled_cached_reqs.new_block_ids for _ in range(4)]
    assert [[len(table) for table in tables] for step in more for tables in step if tables] == [[1, 1]]


def test_the_runner_is_told_of_no_new_block_where_it_clears_none():
    core = core_of(request("a", list(range(5)), most=9), num_blocks=30, specs=[full(), window(3), STATE])
    assert [step(core)[0].new_block_ids_to_zero for _ in range(3)] == [None] * 3


class Device:
    """What lies in each block: of attention the group and the token at each offset, of a state the group and all tokens that it has seen."""

    def __init__(self, specs):
        self.specs, self.blocks, self.runner = specs, {}, Runner(1)
        # Who wrote into a block last.
        self.writers = {}

    def run(self, output, batch):
        """Make the step's copies, write what it writes, and hold what each token attends to against what it should be."""
        for block in output.new_block_ids_to_zero or ():
            self.blocks[block] = {}
        copies = [(copy.dst_block_id, copy.src_block_id) for copy in output.kv_cache_block_copies or ()]
        # Of a block of attention vLLM's runner copies no more than a state's bytes.
        assert all(list(self.blocks[source]) == [STATE_AT] for _, source in copies)
        self.blocks |= {target: dict(self.blocks[source]) for target, source in copies}
        # Its slots are those of blocks of one token, which nobody has.
        starts = self.runner._told(output)
        shares = [
            (self.runner.known[id], starts[id], count, output.scheduled_spec_decode_tokens.get(id, []))
            for id, count in output.num_scheduled_tokens.items()
        ]
        for number, its in enumerate(self.specs):
            (self._run_states if hasattr(its, "shapes") else self._attend)(number, its, shares)
        # A state is written whole.
        assert not any(STATE_AT in self.blocks[block] for block in output.new_block_ids_to_zero or ())

    def _attend(self, number, its, shares):
        size = its.block_size
        for known, start, count, drafts in shares:
            tokens, table = known.prompt + known.outputs + drafts, known.tables[number]
            for position in range(start, start + count):
                assert table[position // size], "a token is written into the null block"
                id = table[position // size]
                block = self.blocks.setdefault(id, {})
                # Drafts of its own that were wrong may lie there.
                is_clear = not block or self.writers[id] is known
                assert position % size or is_clear, "a block is begun that was not cleared"
                block[position % size], self.writers[id] = (number, tokens[position]), known
        for known, start, count, drafts in shares:
            tokens, table = known.prompt + known.outputs + drafts, known.tables[number]
            for position in range(self._front(its, start), start + count):
                found = self.blocks[table[position // size]].get(position % size)
                assert found == (number, tokens[position]), (number, position)

    def _run_states(self, number, its, shares):
        written = {}
        for known, start, count, _ in shares:
            (block,) = known.tables[number]
            tokens = known.prompt + known.outputs
            assert not start or self.blocks[block] == {STATE_AT: (number, tokens[:start])}, (number, start)
            assert block and block not in written, "two requests write one state"
            written[block] = {STATE_AT: (number, tokens[: start + count])}
        self.blocks |= written

    def _front(self, its, start):
        if getattr(its, "attention_chunk_size", None):
            return start // its.attention_chunk_size * its.attention_chunk_size
        return max(0, start - its.sliding_window + 1) if getattr(its, "sliding_window", None) else 0


MODELS = {
    "full and window": [full(), window(5)],
    "several windows": [window(3), full(), window(3), window(7)],
    "window alone": [window(4)],
    "full and chunk": [chunk(6), full()],
    "smaller blocks": [full(4), window(6, 2), window(6, 4)],
    "full and state": [full(), STATE, STATE],
    "state alone": [STATE],
    "all": [full(), window(3), STATE, chunk(5)],
}


def run_at_random(specs, seed, num_drafts):
    """Serve requests that begin alike in a pool for hardly two of the longest; how many tokens they found, and preemptions."""
    chance, policy = random.Random(seed), ("paged", "vllm")[seed % 2]
    layout = plug_in(999, specs=specs).manager.layout
    step = layout.block_size // 2
    num_blocks = layout.pages_for(16 * step + 12) * 3 // 2 + layout.spare_pages
    given = {"max_num_batched_tokens": 16 * step, "max_model_len": 512, "num_speculative_tokens": num_drafts}
    if num_drafts:
        given["speculative_config"] = SimpleNamespace(method="ngram")
    given["additional_config"] = {"paged": {"policy": policy}}
    core = plug_in(num_blocks, layout.block_size, specs=specs, zeroes=True, **given)
    device, hits, preempted = Device(specs), 0, 0
    opening = [chance.randrange(3) for _ in range(7 * step)]
    for k in range(24):
        prompt = chance.choice([[], opening[: 4 * step], opening])
        prompt = prompt + [chance.randrange(3) for _ in range(chance.randint(1, 9 * step))]
        core.add_request(request(f"r{k}", prompt, most=chance.randint(1, 12)))
    for _ in range(4000):
        if not core.get_num_unfinished_requests():
            break
        output = core.schedule()
        batch = core._out[-1][1]
        preempted += len(batch.preempted)
        hits += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        device.run(output, batch)
        sampled = {}
        for place in batch.samples.nonzero()[0].tolist():
            # Of its drafts so many were right.
            drafts = output.scheduled_spec_decode_tokens.get(batch.ids[place], [])
            right = drafts[: chance.randint(0, len(drafts))]
            sampled[batch.ids[place]] = [*right, chance.randrange(3)]
        device.runner.sampled(batch, sampled)
        core.update_from_output(output, answer(output, sampled))
        guesses = [[chance.randrange(3) for _ in range(chance.randint(0, num_drafts))] for _ in sampled]
        core.update_draft_token_ids(SimpleNamespace(req_ids=[*sampled], draft_token_ids=guesses))
        assert core.check() == []
    assert not core.get_num_unfinished_requests() and core.manager.device.num_used == 0
    return hits, preempted


# Drafts beside states are refused.
CASES = [(model, drafts) for model, specs in MODELS.items() for drafts in (0, 3) if not drafts or STATE not in specs]


@pytest.mark.parametrize(("model", "num_drafts"), CASES)
def test_every_token_attends_to_what_it_should_and_finds_its_state_and_wrong_drafts_leave_nothing(model, num_drafts):
    hits = preempted = 0
    for seed in range(6):
        found, gave_way = run_at_random(MODELS[model], seed, num_drafts)
        hits, preempted = hits + found, preempted + gave_way
        # By either policy. States alone never grow.
        if seed and hits and (preempted or model == "state alone"):
            return
    pytest.fail(f"{hits} tokens found, {preempted} preemptions")

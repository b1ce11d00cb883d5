"""Content of layers of several kinds on two tiers beside what the pages themselves say: a prompt that comes alone begins at the longest length
at which the cached pages of the device and the host hold what each group reads."""

import numpy as np
from hypothesis import Phase, given, settings, strategies as st

from paged import BlockManager, Costs, Request, Scheduler
from paged.testing.machines import settings_for
from paged.testing.naive_layers import pages_for, spare_pages
from paged.testing.shadow_groups import ShadowGroups, views_of
from paged.testing.strategies import layer_groups

LONGEST = 16


class OneByOne:
    """Prompts that are served one after the other, by a scheduler beside a shadow of both tiers."""

    def __init__(self, groups, num_pages, size, host_pages, **switches):
        self.groups, self.size = groups, size
        self.manager = BlockManager(
            num_pages, size, host_blocks=host_pages, host_caching=True, groups=groups, **switches
        )
        costs = Costs(seconds_per_swapped_block=0.0)
        self.scheduler = Scheduler(self.manager, costs=costs, max_tokens_per_step=5)
        self.shadow = ShadowGroups(groups, num_pages, size, host_pages)
        self.moved = self.num_prompts = 0

    def longest(self, tokens):
        """The longest length, 0 and ends of blocks, at which what each group reads is on cached pages of either tier."""
        cached = [self.manager.device.states == 1, self.manager.host.states == 1]
        kept = np.concatenate([self.shadow.pages[cached[0]], self.shadow.host[cached[1]]])
        ends = range(0, len(tokens), self.size)
        return max(end for end in ends if not end or not self.shadow.lacking(None, tokens[:end], kept))

    def serve(self, tokens, max_tokens=2):
        """Serve the prompt to its end; where it began."""
        id, starts, known = f"r{self.num_prompts}", [], list(tokens)
        self.num_prompts += 1
        self.scheduler.add(Request(id=id, prompt=list(tokens), max_tokens=max_tokens))
        while self.scheduler.has_unfinished:
            batch = self.scheduler.schedule()
            views = views_of(batch, self.groups)
            assert self.shadow.move(batch.moves) == []
            found, _ = self.shadow.run(batch, views, lambda *_, tokens=known: (None, tokens))
            assert found == []
            starts += (batch.seq_lens - batch.num_tokens).tolist()
            samples = np.ones(int(batch.samples.sum()), np.int64)
            known += samples.tolist()
            self.moved += len(batch.moves.host_to_device)
            self.scheduler.update(batch, samples)
            assert self.scheduler.check() == []
        return starts[0]


@given(data=st.data())
@settings(settings_for(80), phases=[Phase.generate])
def test_a_prompt_that_comes_alone_begins_where_cached_pages_of_both_tiers_let_it(data):
    groups, size = data.draw(layer_groups()), data.draw(st.integers(1, 3))
    need = pages_for(groups, LONGEST + 2, size) + spare_pages(groups, True)
    num_pages = need * data.draw(st.sampled_from([4, 5, 6, 8])) // 4
    host_pages = max(1, num_pages * data.draw(st.sampled_from([1, 2, 4, 8])) // 4)
    world = OneByOne(groups, num_pages, size, host_pages, row_ends=False)
    prompts = [[0, 1] * 8, [1] * 12]
    for _ in range(12):
        before = data.draw(st.sampled_from(prompts))
        length = data.draw(st.integers(0, len(before)))
        prompt = (before[:length] + data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=10)))[:LONGEST]
        prompts.append(prompt)
        expected = world.longest(prompt)
        hit = world.manager.lookup(prompt)
        assert hit.num_tokens + hit.host_tokens == expected
        assert world.serve(prompt) == expected

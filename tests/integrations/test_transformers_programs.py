"""Random clients of transformers' continuous batching on tiny pools: every answer is what `generate` gives to its prompt alone, whoever else
came, shared, was preempted or left; and then every block is free again."""

from hypothesis import event, given, settings, strategies as st
from integrations.batching import Stepped, alone

from paged import Costs

# Two beginnings that many share, and two words to go on with.
BEGINNINGS = ([1, 2, 3, 1, 2, 2, 3, 1, 1], [2, 2, 2, 2, 1])
prompts = st.builds(
    lambda beginning, length, rest: [*beginning[:length], *rest],
    st.sampled_from(BEGINNINGS),
    st.sampled_from([0, 5, 9, 9]),
    st.lists(st.integers(1, 2), min_size=1, max_size=3),
)
adds = st.tuples(st.just("add"), prompts, st.integers(1, 14), st.sampled_from([1, 1, 1, 2, 3]))
cancels = st.tuples(st.just("cancel"), st.integers(0, 20), st.integers(0, 2))
steps = st.tuples(st.just("step"), st.integers(1, 5))
sizes = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["paged", "paged", "vllm", "sarathi"]),
        "num_blocks": st.integers(4, 9),
        "max_batch_tokens": st.sampled_from([4, 8, 24]),
        "max_requests_per_batch": st.sampled_from([3, 4]),
        "allow_block_sharing": st.sampled_from([True, True, True, False]),
        "cpu_offload_space": st.sampled_from([0.0, 8 * 512 / 2**30]),
    }
)


@settings(max_examples=max(1, settings().max_examples // 4))
@given(sizes, st.lists(st.one_of(adds, adds, adds, steps, cancels), min_size=8, max_size=24))
def test_answers_do_not_depend_on_company(given_sizes, program):
    run = Stepped(costs=Costs(seconds_per_swapped_block=1e-9), **given_sizes)
    try:
        ids, lengths, cancelled = [], {}, set()
        for name, *of in program:
            if name == "step":
                for _ in range(of[0]):
                    run.step()
            elif name == "add":
                prompt, num_tokens, num_answers = of
                run.manager.num_return_sequences = num_answers
                id = run.add(prompt, num_tokens)
                ids.append([id, *(f"{id}__child#{k}" for k in range(num_answers - 1))])
                lengths.update(dict.fromkeys(ids[-1], num_tokens))
            elif ids:
                group = ids[of[0] % len(ids)]
                cancelled.add(group[of[1] % len(group)])
                run.manager.cancel_request(group[of[1] % len(group)])
        run.run()
        for group in ids:
            for id in group:
                assert id in run.ended or id in cancelled
        for id, output in run.ended.items():
            answer = alone(tuple(output.prompt_ids), lengths[id])
            assert output.generated_tokens == answer[: len(output.generated_tokens)]
            assert output.error is not None or len(output.generated_tokens) == len(answer)
        assert run.decisions.manager.device.num_used == 0
        assert run.scheduler._groups == {}
        assert run.scheduler._store.tables == {}
        stats = run.decisions.stats()
        for name in ("hit_tokens", "shared_in_flight_tokens", "preemptions_recompute", "preemptions_swap"):
            if getattr(stats, name):
                event(name)
        if max((len(row) for row in ids), default=0) > 1:
            event("several answers")
    finally:
        run.close()

"""transformers' continuous batching on our scheduler: answers are those of `generate`, whatever memory there is; what ends early says why."""

from abc import abstractmethod
from contextlib import ExitStack, closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from integrations.batching import Stepped, alone, manager_of, tiny_llama

from paged import Costs, Moves
from paged.errors import InvalidPool, RefusedByPaged, UnsupportedTransformers
from paged.integrations.transformers import Scheduler, install, needed
from paged.integrations.transformers.block_store import BlockStore

SHARED = [1, 2, 3, 4, 5, 6, 1, 3, 5, 2, 4, 6]
PROMPTS = [[*SHARED, 1 + k % 6, k % 5] for k in range(10)] + [[1 + k % 6, 2, 3] for k in range(4)]


@pytest.fixture
def stepped():
    with ExitStack() as stack:
        yield lambda **given: stack.enter_context(closing(Stepped(**given)))


def run_all(run, prompts, **more):
    for prompt in prompts:
        run.add(prompt, **more)
    run.run()
    return run


def all_equal_alone(stepped, num_tokens=8):
    for output in stepped.ended.values():
        assert output.error is None
        assert output.generated_tokens == alone(tuple(output.prompt_ids), num_tokens)


# Whole and chunked prompts, promises that are kept, and an order of its own; test_transformers_programs.py has others.
@pytest.mark.parametrize("policy", ["paged-cached", "trtllm-guaranteed-no-evict", "trtllm-max-utilization"])
def test_answers_are_those_of_generate(stepped, policy):
    # Every sequence alone takes 6 blocks.
    run = run_all(stepped(policy=policy, num_blocks=7), PROMPTS)
    assert len(run.ended) == len(PROMPTS)
    all_equal_alone(run)
    assert run.decisions.manager.device.num_used == 0
    assert run.decisions.stats().hit_tokens > 0


@pytest.mark.parametrize(
    ("prompts", "given", "computed", "shared"),
    [
        # Twelve tokens once, two of each, and what each answers but for its last token.
        (PROMPTS[:10], {"max_batch_tokens": 64, "max_requests_per_batch": 10}, 12 + 10 * (2 + 7), 9 * 12),
        (PROMPTS[:4], {"allow_block_sharing": False}, 4 * (14 + 7), 0),
    ],
    ids=["shared", "not shared"],
)
def test_prompts_are_shared_while_they_are_computed_where_they_may_be(stepped, prompts, given, computed, shared):
    run = run_all(stepped(num_blocks=200, **given), prompts)
    all_equal_alone(run)
    stats = run.decisions.stats()
    assert (stats.computed_tokens, stats.shared_in_flight_tokens) == (computed, shared)


def test_several_answers_share_their_prompt(stepped):
    run = run_all(stepped(num_blocks=200, num_answers=3), PROMPTS[:3])
    assert len(run.ended) == 9
    all_equal_alone(run)
    assert run.decisions.stats().computed_tokens < 3 * 14 + 9 * 7 + 9 * 2


def test_a_step_that_reads_more_than_the_buffer_runs_in_parts(stepped):
    # Eight rows of up to 22 tokens, most of them shared: the cache holds 48 tokens, and so does transformers' list of what is read.
    run = stepped(num_blocks=12, max_requests_per_batch=8)
    for prompt in PROMPTS[:8]:
        run.add([*prompt, 1], num_tokens=4)
    parts = []
    while run.step() or run.processor.has_pending_requests():
        parts.append(len(run.scheduler._parts))
    assert max(parts) > 0, "no step ran in parts"
    assert len(run.ended) == 8
    all_equal_alone(run, 4)


def test_preempted_requests_are_swapped_to_the_host(stepped):
    bytes_per_block = 2 * 2 * 1 * 8 * 4 * 4
    sizes = {"num_blocks": 7, "max_batch_tokens": 32, "cpu_offload_space": 20.5 * bytes_per_block / 2**30}
    run = stepped(**sizes, costs=Costs(seconds_per_swapped_block=1e-9))
    assert run.decisions.manager.num_host_blocks == 20
    run_all(run, [[1 + k % 6, k % 3, 2, k % 4, 5, 1] for k in range(8)])
    all_equal_alone(run)
    assert run.decisions.stats().swapped_in_blocks > 0


def test_a_stop_id_ends_a_request(stepped):
    answer = alone(tuple(PROMPTS[0]), 8)
    stop = answer[3]
    run = run_all(stepped(), PROMPTS[:1], eos_token_id=[stop, -1])
    (output,) = run.ended.values()
    assert output.generated_tokens == answer[: answer.index(stop) + 1]
    assert run.decisions.stats().finished == 1


def test_streaming_and_logprobs_are_transformers_own(stepped):
    run, seen = stepped(return_logprobs=True), []
    run.manager.output_router.deliver_batch = seen.extend
    run_all(run, PROMPTS[:1], streaming=True)
    assert [len(output.generated_tokens) for output in seen] == list(range(1, 9))
    assert seen[-1].generated_tokens == alone(tuple(PROMPTS[0]), 8)
    assert len(seen[-1].logprobs) == 8


@pytest.mark.parametrize(
    ("prompt", "given", "sentence"),
    [(list(range(1, 7)) * 20, {}, "blocks"), ([], {}, "prompt"), ([1, 2], {"num_tokens": 0}, "max_tokens")],
)
def test_what_is_no_request_ends_alone(stepped, prompt, given, sentence):
    run = stepped(num_answers=2)
    bad = run.add(prompt, **given)
    good = run.add(PROMPTS[0])
    run.run()
    assert sorted(run.ended) == sorted([bad, f"{bad}__child#0", good, f"{good}__child#0"])
    assert sentence in run.ended[bad].error
    assert sentence in run.ended[f"{bad}__child#0"].error
    assert run.ended[good].generated_tokens == alone(tuple(PROMPTS[0]), 8)


def test_a_request_that_outgrows_the_cache_says_so(stepped):
    run = run_all(stepped(num_blocks=4), PROMPTS[:1], num_tokens=20)
    (output,) = run.ended.values()
    assert 'ends with "length": the cache holds 16 tokens' in output.error
    assert output.generated_tokens == alone(tuple(PROMPTS[0]), 20)[: len(output.generated_tokens)]
    assert 16 - 14 <= len(output.generated_tokens) < 20
    assert run.decisions.manager.device.num_used == 0


def test_ids_that_live_are_not_taken_twice(stepped):
    run = stepped()
    run.add(PROMPTS[0], request_id="same")
    run.add(PROMPTS[1], request_id="same")
    run.step()
    assert '"same"' in run.ended.pop("same").error
    run.run()
    assert run.ended["same"].generated_tokens == alone(tuple(PROMPTS[0]), 8)


def test_a_model_that_fails_fails_its_requests_and_the_next_run_begins_anew(stepped):
    run = stepped()
    ids = [run.add(prompt) for prompt in PROMPTS[:3]]
    run.step()
    run.processor.fail_all_requests(RuntimeError("the device is gone"))
    run.processor.reset()
    run.decisions = run.scheduler.decisions
    run.add(PROMPTS[3], request_id="later")
    run.run()
    assert all("gone" in run.ended[id].error for id in ids)
    assert run.ended["later"].generated_tokens == alone(tuple(PROMPTS[3]), 8)


@pytest.fixture
def model():
    """The model, whose cached manager is gone afterwards."""
    yield tiny_llama()
    tiny_llama().destroy_cached_continuous_batching_manager()


def test_generate_batch_runs_on_it_again_and_again(model):
    installed = install(manager_of())
    for _ in range(2):
        found = model.generate_batch(PROMPTS, max_new_tokens=8)
        assert [output.generated_tokens for output in found.values()] == [alone(tuple(p), 8) for p in PROMPTS]
        assert installed.decisions.stats().finished == len(PROMPTS)


def test_other_managers_keep_their_own_and_an_asynchronous_one_runs_one_batch_at_a_time(model):
    mine = install(manager_of())
    model.destroy_cached_continuous_batching_manager()
    assert not isinstance(manager_of()._create_batch_processor().scheduler, Scheduler)
    with pytest.raises(RefusedByPaged, match="not been started"):
        _ = mine.decisions
    model.destroy_cached_continuous_batching_manager()
    install(asynchronous := manager_of(use_async_batching=True))
    assert not asynchronous._create_batch_processor().use_async_batching


def test_what_cannot_be_had_is_refused(model):
    for policy, sentence in (("fifo", "no policy 'fifo'; policies are vllm"), ("orca-max", "reserves regions")):
        manager = manager_of()
        with pytest.raises(RefusedByPaged, match=sentence):
            install(manager, policy=policy)
        assert "_create_batch_processor" not in vars(manager), "nothing has changed"
    model.destroy_cached_continuous_batching_manager()
    install(of_little := manager_of(cpu_offload_space=1e-9))
    with pytest.raises(RefusedByPaged, match="hold no block: one takes 512"):
        of_little._create_batch_processor()


def test_what_is_no_manager_or_no_fresh_one_or_runs_in_parallel_is_refused():
    with pytest.raises(RefusedByPaged, match="got LlamaForCausalLM, which has no continuous_batching_config"):
        install(tiny_llama())
    started = manager_of()
    started.batch_processor = started._create_batch_processor()
    with pytest.raises(RefusedByPaged, match="started or warmed up already"):
        install(started)
    parallel = manager_of()
    parallel.distributed_helper.tp_size = 2
    with pytest.raises(RefusedByPaged, match="tensor parallelism"):
        install(parallel)


@pytest.mark.parametrize("given", [{"sliding_window": 8}, {"layer_types": ["full_attention", "sliding_attention"]}])
def test_layers_that_forget_are_refused(given, monkeypatch):
    manager = manager_of()
    for name, value in given.items():
        monkeypatch.setattr(tiny_llama().config, name, value, raising=False)
    with pytest.raises(RefusedByPaged, match=r"sliding_attention do not keep every token"):
        install(manager)


def test_another_transformers_or_none_is_refused_with_what_is_missing_or_what_it_asks_for_besides(monkeypatch):
    # test_vllm_refusals.py has all that may be missing.
    lacking = {"transformers.generation.continuous_batching.scheduler:Scheduler": ("schedule_step",)}
    monkeypatch.setattr(needed, "NEEDED", lacking)
    missing = r"does not fit: Scheduler has no schedule_step\. Tried versions: 5\.17\.0, "
    with pytest.raises(UnsupportedTransformers, match=missing):
        needed.must_have_all()

    def version(package):
        raise needed.PackageNotFoundError(package)

    monkeypatch.setattr(needed, "version", version)
    said = r"not installed here; .pip install '\.\[engine\]'. in a checkout"
    with pytest.raises(UnsupportedTransformers, match=said):
        needed.must_have_all()
    monkeypatch.undo()
    later = type("Scheduler", (Scheduler,), {"wake_up": abstractmethod(lambda self: None)})
    with pytest.raises(UnsupportedTransformers, match="does not fit: it asks Scheduler for wake_up"):
        needed.must_define_all(later)


def moves(**pairs):
    return Moves(**{kind: np.array(blocks, np.int32) for kind, blocks in pairs.items()})


def test_the_layout_of_older_versions_is_a_pair_of_tensors_for_each_layer():
    block_size, num_blocks = 4, 3
    shape = ((num_blocks + 2) * block_size, 2, 8)
    keys = [torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1000 * k for k in range(2)]
    values = [-tensor for tensor in keys]
    allocator = SimpleNamespace(block_table={"r": [2, 0]})
    cache = SimpleNamespace(block_size=block_size, num_blocks=num_blocks, key_cache=keys, value_cache=values)
    vars(cache).update(group_cache_managers=[allocator], max_blocks_per_request=5)
    bytes_per_block = 4 * 4 * 2 * 8 * 4
    store = BlockStore(cache, 2.9 * bytes_per_block)
    assert (store.num_blocks, store.num_host_blocks, store.first_block, store.longest_decode) == (3, 2, 0, 20)
    assert store.tables is allocator.block_table
    before = [tensor.clone() for tensor in (*keys, *values)]
    store.run(moves(device_to_host=[[2, 1]], device_to_device=[[0, 2]]))
    store.run(moves(host_to_device=[[1, 1]]))
    for tensor, old in zip((*keys, *values), before, strict=True):
        assert torch.equal(tensor.view(5, -1), old.view(5, -1)[[0, 2, 0, 3, 4]])
    with pytest.raises(InvalidPool, match="a move names block 3; there are 3"):
        store.run(moves(device_to_device=[[0, 3]]))

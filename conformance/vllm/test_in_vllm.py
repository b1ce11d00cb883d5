"""The plug-in in vLLM's own engine: `LLM(scheduler_cls=...)` on the embedded model, each engine in a process of its own. PAGED_CHECK is on
throughout: what it found would end the engine."""

import gc

import pytest

vllm = pytest.importorskip("vllm")

OURS = "paged.integrations.vllm.Scheduler"
TEXTS = [
    "The import statement",
    "A list is a mutable sequence",
    "def __init__(self",
    "Exceptions are raised when",
    "The with statement is used to",
    "A generator is",
    "Dictionaries map",
    "class A:",
]


def engine(checkpoint, scheduler=OURS, **given):
    asked = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "block_size": 32,
        "num_gpu_blocks_override": 200,
        "disable_log_stats": False,
    }
    if scheduler is not None:
        asked |= {"scheduler_cls": scheduler, "async_scheduling": False}
    return vllm.LLM(str(checkpoint), **(asked | given))


@pytest.fixture(scope="module")
def ours(checkpoint):
    llm = engine(checkpoint)
    yield llm
    del llm
    gc.collect()


def counters(llm):
    """vLLM's metrics, which are those of the engine that was made last."""
    return {metric.name.removeprefix("vllm:"): metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def greedy(max_tokens=24, **given):
    return vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **given)


def answers(llm, texts, params):
    return [list(output.outputs[0].token_ids) for output in llm.generate(texts, params, use_tqdm=False)]


def test_answers_of_requests_that_run_alone_are_vllms_own(ours, checkpoint):
    alone = [answers(ours, [text], greedy()) for text in TEXTS]
    theirs = engine(checkpoint, None)
    assert alone == [answers(theirs, [text], greedy()) for text in TEXTS]
    del theirs
    gc.collect()


def test_equal_prefixes_are_computed_once_and_each_answer_says_so(ours):
    # As long as several blocks.
    shared = "The import statement combines two operations; it searches for the named module. " * 4
    prompts = [shared + text for text in TEXTS]
    outputs = ours.generate(prompts, greedy(4), use_tqdm=False)
    hits = sum(output.num_cached_tokens for output in outputs)
    lengths = [len(output.prompt_token_ids) for output in outputs]
    common = min(lengths) // 32 * 32
    assert common >= 64
    assert hits >= 7 * (common - 32), (hits, common)


def test_a_pool_far_too_small_answers_as_an_ample_one(ours, checkpoint):
    texts = [text * 3 for text in TEXTS * 2]
    ample = [answers(ours, [text], greedy(200))[0] for text in texts]
    starved = engine(checkpoint, num_gpu_blocks_override=20)
    found = answers(starved, texts, greedy(200))
    assert counters(starved)["num_preemptions"] > 0
    # Other batch sizes round otherwise; the kit says bit by bit what memory does (tests/model).
    assert sum(one == other for one, other in zip(found, ample)) >= len(texts) * 3 // 4
    assert counters(starved)["kv_cache_usage_perc"] == 0
    del starved
    gc.collect()


def test_several_answers_of_one_prompt_with_log_probabilities(ours):
    params = vllm.SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=12, logprobs=2, ignore_eos=True)
    (output,) = ours.generate([TEXTS[0]], params, use_tqdm=False)
    assert len(output.outputs) == 3
    for each in output.outputs:
        assert len(each.token_ids) == len(each.logprobs) == 12
        assert all(token in table for token, table in zip(each.token_ids, each.logprobs))


def test_log_probabilities_of_a_prompt_that_is_cached(ours):
    answers(ours, [TEXTS[1] * 20], greedy(2))
    (output,) = ours.generate([TEXTS[1] * 20], greedy(2, prompt_logprobs=1), use_tqdm=False)
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert all(table is not None for table in output.prompt_logprobs[1:])


def test_stop_strings_and_stop_ids_end_an_answer(ours):
    (whole,) = ours.generate([TEXTS[0]], greedy(24), use_tqdm=False)
    text = whole.outputs[0].text
    word = text.split()[2]
    (cut,) = ours.generate([TEXTS[0]], greedy(24, stop=[word]), use_tqdm=False)
    assert cut.outputs[0].finish_reason == "stop" and cut.outputs[0].stop_reason == word
    token = whole.outputs[0].token_ids[5]
    first = list(whole.outputs[0].token_ids).index(token)
    (cut,) = ours.generate([TEXTS[0]], greedy(24, stop_token_ids=[token]), use_tqdm=False)
    assert cut.outputs[0].stop_reason == token and len(cut.outputs[0].token_ids) == first + 1
    assert ours.reset_prefix_cache(), "no block is used"


def test_a_choice_is_kept_to(ours):
    from vllm.sampling_params import StructuredOutputsParams

    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["import", "raise"])
    )
    outputs = ours.generate(TEXTS, params, use_tqdm=False)
    assert {output.outputs[0].text for output in outputs} <= {"import", "raise"}


def test_guesses_from_the_prompt_change_no_answer(ours, checkpoint):
    texts = [(text + " ") * 6 for text in TEXTS]
    plain = [answers(ours, [text], greedy(40))[0] for text in texts]
    drafting = engine(
        checkpoint,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    )
    assert [answers(drafting, [text], greedy(40))[0] for text in texts] == plain
    assert counters(drafting)["spec_decode_num_accepted_tokens"] > 0
    answers(drafting, texts, greedy(40))
    del drafting
    gc.collect()


def test_an_abort_in_the_middle_gives_every_block_back(ours):
    ours.llm_engine.add_request("gone", TEXTS[2], greedy(100))
    ours.llm_engine.add_request("stays", TEXTS[3], greedy(10))
    for _ in range(4):
        ours.llm_engine.step()
    ours.llm_engine.abort_request(["gone"])
    while ours.llm_engine.has_unfinished_requests():
        ours.llm_engine.step()
    assert ours.reset_prefix_cache(), "no block is used"


def test_a_reset_forgets_what_is_cached(ours):
    answers(ours, [TEXTS[4] * 20], greedy(2))
    assert ours.reset_prefix_cache()
    (output,) = ours.generate([TEXTS[4] * 20], greedy(2), use_tqdm=False)
    assert output.num_cached_tokens == 0
    (output,) = ours.generate([TEXTS[4] * 20], greedy(2), use_tqdm=False)
    assert output.num_cached_tokens > 64


def test_what_was_recorded_of_vllm_is_what_is_installed(repository):
    import json

    from conformance.vllm.record import recorded

    found = json.loads((repository / "tests" / "integrations" / "vllm_interface.json").read_text())
    assert recorded()["names"] == found["names"]


def test_an_option_that_is_refused_is_refused_before_the_engine_starts(checkpoint, capfd):
    with pytest.raises(RuntimeError, match="Engine core initialization failed"):
        engine(checkpoint, additional_config={"paged": {"policy": "orca-max"}})
    out, err = capfd.readouterr()
    assert "there is no policy 'orca-max'" in out + err

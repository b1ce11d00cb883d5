"""The examples that run the model which ships: what they print, and agents on a server whose pool is too small."""

import asyncio

from ..serving.serving_process import served  # noqa: TID252


def test_generate_gives_the_same_words_together_and_alone(example, capsys):
    answers = example("generate").main()
    assert len(answers) == 3
    assert all(answers)
    assert "first token after" in capsys.readouterr().out


def test_stream_ends_one_request_by_length_and_one_by_abort(example, capsys):
    texts = example("stream").main()
    out = capsys.readouterr().out
    assert 60 < len(texts["drawn"]) < 120
    assert "length" in out
    assert set(texts) == {"greedy", "drawn"}


def test_in_flight_batching_takes_the_steps_that_one_can_count_by_hand(example):
    times = example("continuous_batching").times
    static, in_flight = times("static"), times("paged")
    # Four batches, each as long as its one request of 100.
    assert static.steps == 4 * 100
    # Places come free every 10 steps, and the fourth long request is let in with the seventh that finds one: after 30 steps.
    assert in_flight.steps == 30 + 100
    assert 0 < static.short < static.seconds and 0 < in_flight.short < in_flight.seconds


def test_transformers_batching_answers_as_generate_does_whatever_memory_there_is(example, capsys):
    assert example("transformers_batching").main() == {"ample": 0, "a third": 0, "starved": 0}
    starved = capsys.readouterr().out.splitlines()[-1]
    assert "(0 again)" not in starved


def test_llamas_generate_repeats_the_prompt_and_says_how_likely_all_of_it_was(example, capsys):
    module = example("llama_generate")
    answers = module.main()
    for prompt, (text, values) in zip(module.PROMPTS, answers, strict=True):
        assert text.startswith(prompt) and len(text) > len(prompt)
        assert values[0] is None and all(value <= 0 for value in values[1:])
    out = capsys.readouterr().out
    assert (out.count("\n"), module.main()) == (4, answers)


def test_hints_keep_what_agents_come_back_for(example, capsys):
    with served(blocks=220, max_num_seqs=8) as server:
        shares = asyncio.run(example("agent").main(f"{server.url}/v1"))
    assert shares["with hints"] > shares["without hints"]
    without, with_hints = capsys.readouterr().out.splitlines()
    assert without.startswith("without hints  TTFT of later turns")
    assert with_hints.startswith("with hints     TTFT of later turns")

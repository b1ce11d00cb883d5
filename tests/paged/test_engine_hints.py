"""Sessions and hints of an engine: what a turn leaves is kept, pinned and let go; what would not do is refused, and the engine goes on."""

import asyncio

import pytest

from paged import AsyncEngine, Engine, Hint, SamplingParams
from paged.errors import UnknownSession
from paged.testing.tiny_model import tiny_model

from ..driving import driven  # noqa: TID252

PROMPT = [7 * place % 61 + 1 for place in range(24)]


def engine_of(**options):
    return Engine(tiny_model(64), **{"block_size": 4, "num_blocks": 32, "max_tokens_per_step": 16} | options)


def turn(engine, prompt=PROMPT, session="a", **wishes):
    """One turn of a session, to its end; the prompt tokens that were found in the cache."""
    engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True), id="turn", session_id=session, **wishes)
    (usage,) = [output.usage for output in driven(engine) if output.finished]
    return usage.hit_tokens


def strangers(engine, num=3):
    """Requests of no session that fill the pool."""
    for number in range(num):
        engine.add_request([number + 1] * 60, SamplingParams(max_tokens=4, ignore_eos=True))
        driven(engine)


def test_what_a_turn_leaves_outlives_strangers_until_its_session_has_ended():
    engine = engine_of()
    turn(engine)
    strangers(engine)
    assert engine.session("a").device_blocks == 6
    assert turn(engine) == 20
    assert [view.id for view in engine.sessions(5)] == ["a"]
    assert engine.hint(Hint(action="end", session="a")).status == "accepted"
    strangers(engine)
    assert turn(engine, session=None) == 0
    with pytest.raises(UnknownSession):
        engine.session("a")


def test_a_pin_counts_against_the_caps_of_the_engine_and_ends_with_its_session():
    engine = engine_of(max_pinned=12, max_pinned_per_tenant=6)
    turn(engine)
    for number, session in enumerate("bc"):
        turn(engine, [9 - number] * 20, session)
    asked = (("a", "t"), ("b", "t"), ("b", None), ("c", "other"))
    pins = [engine.hint(Hint(action="pin", session=session, tenant=tenant)) for session, tenant in asked]
    assert [pin.status for pin in pins] == ["accepted", "rejected", "accepted", "rejected"]
    assert "max_pinned_per_tenant (6)" in pins[1].reason and "max_pinned (12)" in pins[3].reason
    assert (engine.session("a").pinned_blocks, engine.scheduler.num_pinned) == (6, 11)
    assert engine.hint(Hint(action="end", session="a")).num_tokens == 24
    assert engine.scheduler.num_pinned == 5 and engine.check() == []


def test_text_is_hinted_of_and_explained_as_its_tokens_are():
    engine = Engine(num_blocks=64)
    text = "Explain what the with statement of Python does. " * 4
    engine.add_request(text, SamplingParams(max_tokens=1))
    driven(engine)
    size = engine.manager.block_size
    whole = len(engine.encoded(text)) // size
    assert engine.hint(Hint(action="retain", tokens=text)).num_tokens == whole * size
    found = engine.explain_prefix(text)
    assert found.device_tokens == whole * size
    assert "cached on the device" in str(found)


def test_an_engine_for_asyncio_takes_the_same_and_makes_the_step_of_a_prefetch():
    async def main():
        options = {"block_size": 4, "num_blocks": 24, "host_blocks": 64, "host_caching": True}
        async with AsyncEngine(tiny_model(64), **options) as engine:
            # What others compute sends the prompt to the host, and leaves blocks of the device free.
            for prompt, writes in ((PROMPT, True), ([9] * 95, False)):
                async for _ in engine.generate(prompt, SamplingParams(max_tokens=1), writes_cache=writes):
                    pass
            outcome = await engine.hint(Hint(action="prefetch", tokens=PROMPT))
            found = [str(await engine.explain_prefix(PROMPT)) for _ in range(4)]
            assert (outcome.status, found[-1]) == ("accepted", "24 of 24 tokens are cached on the device.")
            assert not engine.engine.has_unfinished and engine.engine.check() == []
            async for _ in engine.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True), session_id="a"):
                pass
            kept = await engine.hint(Hint(action="retain", session="a", priority=2, waits_for="tool"))
            views = await engine.sessions(5)
            assert (kept.status, views[0].waits_for, views) == ("accepted", "tool", [await engine.session("a")])

    asyncio.run(main())


@pytest.mark.parametrize("action", ["pin", "prefetch"])
def test_a_pinned_or_fetched_turn_of_a_model_with_states_goes_on_where_it_ended_as_if_computed(action):
    def answered(engine, prompt, session=None):
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        engine.add_request(prompt, params, id="turn", session_id=session, writes_cache=session is not None)
        outputs = driven(engine)
        return [token for output in outputs for token in output.token_ids], outputs[-1].usage.hit_tokens

    pins = action == "pin"
    engine = Engine(
        "hybrid", num_blocks=60, **({"max_pinned": 24} if pins else {"host_blocks": 120, "host_caching": True})
    )
    prompt = list(range(1, 60))
    prompt += answered(engine, prompt, "a")[0] + [7, 8, 9]

    def hint():
        assert engine.hint(Hint(action=action, session="a")).status == "accepted"

    def fill():
        """Let others take all that may be evicted; before a prefetch they leave nothing."""
        for other in ("b", "c", "d") if pins else ():
            answered(engine, [ord(other)] * 265, other)
            engine.hint(Hint(action="retain", session=other, priority=3))
        if not pins:
            answered(engine, [5] * 440)

    for do in (hint, fill) if pins else (fill, hint):
        do()
    driven(engine)
    there = engine.explain_prefix(prompt)
    assert (there.device_tokens, there.host_tokens) == (48, 0)
    # The last token of a turn is not computed.
    assert answered(engine, prompt, "a") == (answered(Engine("hybrid", num_blocks=60), prompt)[0], 62)

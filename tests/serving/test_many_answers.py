"""Many long answers to one prompt: each has the tokens that were asked for, or the request is refused with numbers that would do."""

import msgspec
import pytest

from .http_client import CHAT, asked as ask_server  # noqa: TID252
from .samples import READY  # noqa: TID252

DRAWN = {"prompt": [5, 6, 7], "temperature": 1.0, "ignore_eos": True}
# 80 blocks of 16 tokens: ten for each of eight answers.
MOST = 10 * 16 - 3 + 1


@pytest.fixture(params=[("tenants_server", "right"), ("odd_server", "sk-right")], ids=["cached", "not cached"])
def asked(request):
    name, key = request.param
    server = request.getfixturevalue(name)
    return lambda *arguments: ask_server(server, *arguments, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("more", [{"n": 8}, {"n": 2, "best_of": 8}], ids=str)
def test_answers_that_do_not_fit_beside_each_other_are_refused_with_what_would(asked, more):
    heard = asked(DRAWN | {"max_tokens": 1000, **more})
    assert (heard.status, heard.error["param"], heard.error["code"]) == (400, "max_tokens", "context_length_exceeded")
    assert f"max_tokens {MOST}, or a smaller {'best_of' if 'best_of' in more else 'n'}" in heard.error["message"]
    assert "80 blocks of 16 tokens" in heard.error["message"]
    assert asked(DRAWN | {"max_tokens": MOST + 1, **more}).status == 400


@pytest.mark.parametrize("more", [{"max_tokens": MOST}, {"prompt": [5] * 100, "max_tokens": 16}], ids=str)
def test_answers_that_just_fit_have_every_token(asked, more):
    assert asked(DRAWN | {"n": 8} | more).usage["completion_tokens"] == 8 * more["max_tokens"]


def test_answers_of_a_conversation_that_names_no_length_are_as_long_as_all_may_be(asked):
    body = {"messages": [{"role": "user", "content": "a"}], "temperature": 1.0, "ignore_eos": True, "n": 8}
    usage = asked(body, CHAT).usage
    assert usage["completion_tokens"] == 8 * (160 - usage["prompt_tokens"] + 1)


@pytest.mark.parametrize("param", ["n", "best_of"])
@pytest.mark.parametrize("number", [9, 33])
def test_more_answers_than_run_together_are_refused_by_their_field(asked, param, number):
    heard = asked(DRAWN | {"max_tokens": 5, param: number})
    assert (heard.status, heard.error["param"]) == (400, param)


@pytest.mark.parametrize(("length", "longest"), [(1, 41), (40, 41), (41, 100)])
def test_a_sequence_stays_on_the_side_of_the_rotary_limit_where_it_began(length, longest):
    limited = msgspec.structs.replace(READY, block_size=4, num_blocks=32, max_model_len=100, rotary_limit=40)
    assert limited.longest(length) == longest

"""Many long answers to one prompt: each has the tokens that were asked for, or the request is refused with numbers that would do."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from .http_client import ask  # noqa: TID252
from .serving_process import served  # noqa: TID252

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
DRAWN = {"temperature": 1.0, "ignore_eos": True}
# 80 blocks of 16 tokens: ten for each of eight answers.
PROMPT = [5, 6, 7]
MOST = 10 * 16 - len(PROMPT) + 1


@pytest.fixture(scope="module", params=[True, False], ids=["cached", "not cached"])
def server(request):
    with served(log="off", max_sequences=8, blocks=80, prefix_caching=request.param) as found:
        yield found


def told(server, body, path=TEXT):
    return asyncio.run(asyncio.wait_for(ask(server.port, path, DRAWN | body), 120))


@pytest.mark.parametrize("more", [{"n": 8}, {"n": 2, "best_of": 8}], ids=str)
def test_answers_that_do_not_fit_beside_each_other_are_refused_with_what_would(server, more):
    heard = told(server, {"prompt": PROMPT, "max_tokens": 1000, **more})
    assert (heard.status, heard.error["param"], heard.error["code"]) == (400, "max_tokens", "context_length_exceeded")
    assert f"max_tokens {MOST}, or a smaller {'best_of' if 'best_of' in more else 'n'}" in heard.error["message"]
    assert "80 blocks of 16 tokens" in heard.error["message"]
    assert told(server, {"prompt": PROMPT, "max_tokens": MOST + 1, **more}).status == 400


def test_answers_that_just_fit_have_every_token(server):
    heard = told(server, {"prompt": PROMPT, "max_tokens": MOST, "n": 8})
    assert heard.usage["completion_tokens"] == 8 * MOST
    longer = told(server, {"prompt": [5] * 100, "max_tokens": 16, "n": 8})
    assert longer.usage["completion_tokens"] == 8 * 16


def test_answers_of_a_conversation_that_names_no_length_are_as_long_as_all_may_be(server):
    heard = told(server, {"messages": [{"role": "user", "content": "a"}], "n": 8}, CHAT)
    assert heard.usage["completion_tokens"] % 8 == 0
    assert heard.usage["completion_tokens"] // 8 + heard.usage["prompt_tokens"] - 1 == 160


def test_more_answers_than_run_together_are_refused_by_their_field(server):
    for more, param in (({"n": 9}, "n"), ({"best_of": 9}, "best_of"), ({"n": 33}, "n"), ({"best_of": 33}, "best_of")):
        heard = told(server, {"prompt": PROMPT, "max_tokens": 5, **more})
        assert (heard.status, heard.error["param"]) == (400, param)

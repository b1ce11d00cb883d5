"""`vllm serve` with the flag, asked by the `openai` client: streams, several answers, log-probabilities, stop strings, a JSON schema, clients
that leave, and eight at once on a pool far too small. PAGED_CHECK is on in the server; what it found would end it."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

PROMPT = "The import statement combines two operations; it searches for the named module, then it binds the results. "


class Server:
    """A running `vllm serve`, and what it logs."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        command = [
            *(str(Path(sys.executable).parent / "vllm"), "serve", str(checkpoint)),
            *(
                "--scheduler-cls",
                "paged.integrations.vllm.Scheduler",
                "--no-async-scheduling",
                "--no-enable-prefix-caching",
            ),
            *("--port", str(self.port), "--served-model-name", "embedded", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"),
            *("--block-size", "32", "--num-gpu-blocks-override", "20"),
            # A model this small fills its answer with spaces, where it may.
            *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        ]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=quiet_environment())
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=600, max_retries=0
        )

    def wait(self) -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2)
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-4000:])

    def metric(self, name: str) -> float:
        page = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10).read().decode()
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name + "{"))


def quiet_environment() -> dict[str, str]:
    import os

    return os.environ | {"VLLM_LOGGING_LEVEL": "INFO"}


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    running = Server(checkpoint, tmp_path_factory.mktemp("serve") / "log")
    try:
        running.wait()
        yield running
    finally:
        running.process.terminate()
        running.process.wait(30)


def ask(server, prompt=PROMPT, **given):
    return server.client.completions.create(
        model="embedded", prompt=prompt, **({"max_tokens": 16, "temperature": 0} | given)
    )


def test_the_log_says_whose_scheduler_runs(server):
    assert "paged's scheduler runs on vLLM" in server.log.read_text()


def test_a_stream_is_the_answer_in_pieces(server):
    whole = ask(server).choices[0].text
    pieces = [chunk.choices[0].text for chunk in ask(server, stream=True)]
    assert len(pieces) > 4 and "".join(pieces) == whole


def test_two_answers_with_log_probabilities(server):
    answer = ask(server, n=2, logprobs=1, temperature=0.9, seed=3)
    assert len(answer.choices) == 2
    assert all(len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 16 for choice in answer.choices)


def test_a_stop_string_ends_an_answer(server):
    word = ask(server).choices[0].text.split()[1]
    cut = ask(server, stop=[word])
    assert cut.choices[0].finish_reason == "stop" and word not in cut.choices[0].text


def test_an_answer_keeps_to_a_schema(server):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = ask(server, max_tokens=60, extra_body={"structured_outputs": {"json": schema}})
    assert set(json.loads(answer.choices[0].text)) == {"ok"}


def test_a_client_that_leaves_gives_its_blocks_back(server):
    stream = ask(server, max_tokens=380, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    until = time.monotonic() + 20
    while server.metric("vllm:num_requests_running") and time.monotonic() < until:
        time.sleep(0.1)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_eight_clients_at_once_on_a_pool_far_too_small_are_all_answered(server):
    def one(number: int) -> int:
        answer = ask(server, PROMPT * 2 + str(number), max_tokens=300, extra_body={"ignore_eos": True})
        return answer.usage.completion_tokens

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == [300] * 8
    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.metric("vllm:prefix_cache_hits_total") > 0


def test_what_does_not_fit_is_refused_and_the_server_goes_on(server):
    with pytest.raises(openai.BadRequestError):
        ask(server, "word " * 3000)
    assert ask(server).choices[0].text


def test_the_server_ends_without_an_error(server):
    assert "Traceback" not in server.log.read_text()
    assert server.process.poll() is None

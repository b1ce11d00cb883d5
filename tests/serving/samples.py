"""An engine that takes requests and a request that has ended, as metrics, log and traces are told of them."""

from paged.serving.records import RequestRecord
from paged.serving.wire import Ready

READY = Ready(
    block_size=16, num_blocks=100, host_blocks=20, block_bytes=4096, cache_tokens=1600, max_model_len=1600, max_sequences=8,
    max_tokens_per_step=256, vocabulary_size=512, policy="paged", dtype="float32", device="cpu",
    prefix_caching=True,
)  # fmt: skip
RECORD = RequestRecord(
    id="cmpl-1", endpoint="/v1/completions", arrived=100.0, tenant="research", n=2, answers=2, max_tokens=20,
    submitted=100.125, begun=100.25, first=100.5, last=102.0, ended=102.25, status=200, finish_reason="length",
    prompt_tokens=40, cached_tokens=30, output_tokens=32, longest_answer=20, recomputed_tokens=7, preemptions=3,
    longest_pause_s=0.75, prompt="a secret", answer="an answer",
)  # fmt: skip

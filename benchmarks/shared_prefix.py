"""64 requests that arrive together and share 4 prefixes: what sharing in flight costs an engine, against prefixes that are there already.

    python benchmarks/shared_prefix.py --model DIR --prefix 512 --rounds 5

Three runs a round on the same engine and requests: all together on an empty cache; the 4 prefixes alone on an empty cache; and all together
after them. The first should take no longer than the other two together. Prompt tokens computed are counted, too: each distinct one once.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from paged import Engine, SamplingParams
from paged.model.checkpoint import checkpoint_path

NUM_PREFIXES, NUM_REQUESTS, TAIL = 4, 64, 16


def serve(engine: Engine, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds until all are answered."""
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    began = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Sharing in flight against a cache that is filled.")
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint folder; default: the one that ships")
    parser.add_argument("--prefix", type=int, default=128, help="tokens that 16 requests share")
    parser.add_argument("--outputs", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    longest = arguments.prefix + TAIL + arguments.outputs
    engine = Engine(
        arguments.model or checkpoint_path(),
        num_blocks=(NUM_REQUESTS + NUM_PREFIXES) * -(-longest // 16),
        max_tokens_per_step=1024,
        max_sequences=NUM_REQUESTS,
        max_model_len=longest,
        batch_invariant=False,
    )
    rng = np.random.default_rng(0)
    vocabulary = engine.model.vocabulary_size
    prefixes = rng.integers(0, vocabulary, (NUM_PREFIXES, arguments.prefix)).tolist()
    tails = rng.integers(0, vocabulary, (NUM_REQUESTS, TAIL)).tolist()
    prompts = [prefixes[number % NUM_PREFIXES] + tail for number, tail in enumerate(tails)]
    serve(engine, prompts, 2)
    rounds = []
    for _ in range(arguments.rounds):
        engine.manager.reset_cache()
        before = engine.scheduler.stats().computed_tokens
        together = serve(engine, prompts, arguments.outputs)
        computed = engine.scheduler.stats().computed_tokens - before - NUM_REQUESTS * (arguments.outputs - 1)
        engine.manager.reset_cache()
        alone = serve(engine, prefixes, 1)
        cached = serve(engine, prompts, arguments.outputs)
        rounds.append(
            {"together_s": together, "alone_s": alone, "cached_s": cached, "computed_prompt_tokens": computed}
        )
        print(
            f"together {together:.2f} s, prefixes {alone:.2f} s, the rest {cached:.2f} s: {together / (alone + cached):.3f} ×"
        )
    ratios = [each["together_s"] / (each["alone_s"] + each["cached_s"]) for each in rounds]
    distinct = NUM_PREFIXES * arguments.prefix + NUM_REQUESTS * TAIL
    computed_tokens = sorted({each["computed_prompt_tokens"] for each in rounds})
    print(
        f"median {statistics.median(ratios):.3f} × ({min(ratios):.3f} to {max(ratios):.3f}); prompt tokens computed {computed_tokens}, distinct {distinct}"
    )
    if arguments.out is not None:
        found = {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "prefix": arguments.prefix,
            "rounds": rounds,
        }
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    main()

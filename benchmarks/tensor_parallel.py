"""Steps of one model on one process and on several: seconds and processor seconds of a step, by ranks and rows.

    python benchmarks/tensor_parallel.py --ranks 1,2 --rows 1,16,64

The model has random weights, which do not change how long a step takes. Numbers of a machine that is doing something else mean little: ranks wait
for each other, so that one that has no core holds up all.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from paged import Engine, SamplingParams
from paged.model.loading import silenced

_PROMPT, _WARM = 64, 3


def main() -> None:
    """Print a line for each number of ranks and of rows."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", default="1,2")
    options.add_argument("--rows", default="1,16,64")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--layers", type=int, default=30)
    options.add_argument("--hidden", type=int, default=576)
    options.add_argument("--dtype", default="float32")
    asked = options.parse_args()
    with TemporaryDirectory() as folder:
        _write(Path(folder), asked.layers, asked.hidden)
        print("ranks  rows  ms a step  of them host  processor ms of rank 0")
        for ranks in map(int, asked.ranks.split(",")):
            engine = Engine(
                folder, tensor_parallel_size=ranks, dtype=asked.dtype, kv_cache_bytes=2**28, max_sequences=64
            )
            for rows in map(int, asked.rows.split(",")):
                wall, host, cpu = _steps(engine, rows, asked.steps)
                print(f"{ranks:5}  {rows:4}  {wall * 1e3:9.2f}  {host * 1e3:12.2f}  {cpu * 1e3:22.2f}", flush=True)
            engine.close()


def _write(folder: Path, layers: int, hidden: int) -> None:
    """SmolLM-135M's shape by default, but for 8 heads with 4 KV heads, which two ranks can split."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with silenced():
        LlamaForCausalLM(config).save_pretrained(folder)


def _steps(engine: Engine, rows: int, steps: int) -> tuple[float, float, float]:
    """Seconds of a decoding step, the shortest; the host's of it, the mean; and processor seconds of rank 0's process, the mean."""
    drawn, begun = np.random.default_rng(rows), set()
    params = SamplingParams(max_tokens=_PROMPT + _WARM + steps, ignore_eos=True)
    ids = [engine.add_request(drawn.integers(3, 49152, _PROMPT).tolist(), params) for _ in range(rows)]
    while len(begun) < rows:
        begun |= {each.id for each in engine.step() if each.token_ids}
    for _ in range(_WARM):
        engine.step()
    found, host, cpu = [], engine.stats().host_s, time.process_time()
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - began)
    result = min(found), (engine.stats().host_s - host) / steps, (time.process_time() - cpu) / steps
    engine.forget(ids)
    return result


if __name__ == "__main__":
    main()

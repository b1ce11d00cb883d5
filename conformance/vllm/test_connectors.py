"""vLLM's example connector in vLLM's own engine, on our scheduler: what one engine saves to a folder the next one loads, and answers stay."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

PROGRAM = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import vllm
checkpoint, folder, name, path, policy = sys.argv[1:]
transfer = {} if not folder else {"kv_transfer_config": {
    "kv_connector": name, "kv_role": "kv_both", "kv_load_failure_policy": policy,
    "kv_connector_extra_config": {"shared_storage_path": folder}, **({"kv_connector_module_path": path} if path else {}),
}}
llm = vllm.LLM(
    checkpoint, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=512, block_size=32,
    num_gpu_blocks_override=64, async_scheduling=False, scheduler_cls="paged.integrations.vllm.Scheduler", **transfer,
)
params = vllm.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
texts = [f"In case {k} the import statement, as the manual says, " * 6 for k in range(4)]
found, hits = [], []
for text in texts:
    (output,) = llm.generate([text], params, use_tqdm=False)
    found.append((list(output.outputs[0].token_ids), output.outputs[0].finish_reason))
    hits.append(output.num_cached_tokens)
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
print("FOUND " + json.dumps({
    "answers": found, "hits": hits, "wrong": scheduler.check(), "used": scheduler.manager.device.num_used,
}))
"""


def ran(checkpoint, folder="", name="ExampleConnector", path="", policy="recompute"):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(checkpoint), str(folder), name, path, policy],
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("FOUND "))
    assert (found["wrong"], found["used"]) == ([], 0)
    return found


def test_what_one_engine_saves_the_next_one_loads_and_answers_stay_also_where_a_load_fails(checkpoint, tmp_path):
    alone, saving = ran(checkpoint), ran(checkpoint, tmp_path)
    assert saving["answers"] == alone["answers"] and any(tmp_path.iterdir())
    loading = ran(checkpoint, tmp_path)
    assert loading["answers"] == alone["answers"]
    # What a prompt finds here is counted, too; the first one finds nothing here.
    assert loading["hits"][0] >= 32 and sum(loading["hits"]) > sum(saving["hits"])
    failing = ran(checkpoint, tmp_path, "FailingConnector", "conformance.vllm.failing")
    assert failing["answers"] == alone["answers"]
    ended = ran(checkpoint, tmp_path, "FailingConnector", "conformance.vllm.failing", "fail")
    assert [reason for _, reason in ended["answers"]] == ["error"] * 4

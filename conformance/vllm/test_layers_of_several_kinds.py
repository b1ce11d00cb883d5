"""Models with windows, chunks and states in vLLM's own engine: answers are those of vLLM's own scheduler, short of memory too."""

import json
import subprocess
import sys

import pytest

from conformance.vllm.models import FAMILIES, write

pytest.importorskip("vllm")

PROGRAM = """
import json, os, random, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Without this vLLM holds all tokens of chunks.
os.environ["VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"] = "1"
import vllm
checkpoint, num_blocks, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
is_ours = num_blocks < 400
# Under a policy with which requests are preempted.
OURS = {"scheduler_cls": "paged.integrations.vllm.Scheduler", "additional_config": {"paged": {"policy": sys.argv[4]}}}
llm = vllm.LLM(
    checkpoint, dtype=dtype, enforce_eager=True, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=128, block_size=32,
    num_gpu_blocks_override=num_blocks, async_scheduling=False, enable_prefix_caching=False, skip_tokenizer_init=True,
    **(OURS if is_ours else {}),
)
chance = random.Random(0)
opening = [chance.randrange(3, 512) for _ in range(150)]
lengths = (5, 33, 64, 90, 130, 20, 100, 7)
prompts = [opening[: 75 * (k % 3)] + [chance.randrange(3, 512) for _ in range(length)] for k, length in enumerate(lengths)]
params = vllm.SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True, detokenize=False, logprobs=0)
def answers(prompts):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    found = []
    for prompt, its in zip(prompts, [output.outputs[0] for output in outputs]):
        logprobs = [table[token].logprob for table, token in zip(its.logprobs, its.token_ids)]
        found.append({"prompt": prompt, "tokens": list(its.token_ids), "logprobs": logprobs})
    return found
if not is_ours:
    # One by one, so that batches change nothing.
    print("FOUND " + json.dumps({"answers": [answers([prompt])[0] for prompt in prompts]}))
    sys.exit()
first, again = answers(prompts), answers(prompts)
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
print("FOUND " + json.dumps({
    "answers": first, "again": again, "wrong": scheduler.check(), "used": scheduler.manager.device.num_used,
    "groups": len(scheduler.manager.layout.groups), "hits": scheduler.manager.stats().hit_tokens,
    "preempted": scheduler.decisions.stats().preemptions_recompute,
}))
"""


def found(family, checkpoint, num_blocks, repository):
    command = [sys.executable, "-c", PROGRAM, str(checkpoint), str(num_blocks), family.dtype, family.policy]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=repository)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, ended.stdout[-3000:] + ended.stderr[-3000:]
    return json.loads(lines[0].removeprefix("FOUND "))


def both(family, checkpoint, repository):
    """What vLLM's own scheduler answers with ample memory, and ours with little; that all is well with ours."""
    theirs, ours = [found(family, checkpoint, num, repository) for num in (400, family.num_blocks)]
    assert ours["wrong"] == [] and ours["used"] == 0
    assert ours["preempted"] > 0 and ours["hits"] > 0
    return theirs, ours


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.keeps_states])
def test_answers_short_of_memory_are_those_of_vllms_own_scheduler(name, tmp_path, repository):
    family = FAMILIES[name]
    theirs, ours = both(family, write(family, tmp_path), repository)
    # Batches of other sizes round otherwise: one answer may differ.
    for answers in (ours["answers"], ours["again"]):
        alike = [one["tokens"] == other["tokens"] for one, other in zip(answers, theirs["answers"])]
        assert sum(alike) >= len(alike) - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.keeps_states])
def test_states_short_of_memory_are_as_near_to_transformers_as_vllms_own(name, tmp_path, repository):
    """By log-probability: vLLM's CPU kernels round so that its own answers change with the batch."""
    import torch
    from transformers import AutoModelForCausalLM

    family = FAMILIES[name]
    theirs, ours = both(family, write(family, tmp_path), repository)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).float().eval()

    def error(answers):
        errors = []
        for prompt, tokens, logprobs in (answer.values() for answer in answers):
            with torch.no_grad():
                seen = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
            expected = seen[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
            errors.append((expected - torch.tensor(logprobs)).abs())
        return torch.cat(errors).mean().item()

    errors = [error(answers) for answers in (theirs["answers"], ours["answers"], ours["again"])]
    # Without the copies of states it is 1.4 times as much, or far more.
    assert max(errors) < 1.2 * errors[0], errors

"""Answers to a few prompts, from the small model that ships with paged, or from a checkpoint folder.

    python examples/generate.py [FOLDER]

The same prompts give the same words whatever else runs beside them: compare the answers with those of one prompt alone.
"""

import sys

from paged import LLM, SamplingParams

PROMPTS = ["The with statement", "Return a new list", "An assignment statement evaluates"]


def main(folder: str | None = None) -> list[str]:
    params = SamplingParams(max_tokens=24)
    llm = LLM(folder, num_blocks=12, block_size=8)
    together = llm.generate(PROMPTS, params)
    for answer in together:
        print(
            f"{answer.prompt}{answer.text}\n  {answer.finish_reason}, first token after {answer.timings.ttft_s:.3f} s\n"
        )
    alone = [llm.generate(prompt, params)[0].text for prompt in PROMPTS]
    assert alone == [answer.text for answer in together]
    return alone


if __name__ == "__main__":
    main(*sys.argv[1:])

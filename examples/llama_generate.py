"""What Llama's reference `generate` does (temperature 0.6, top-p 0.9, logprobs, echo), on paged memory.

With `echo` the prompt's tokens stand before the output's, and so do their log-probabilities; the first token has none. The drawn tokens are
others than Llama's own code would draw, from the same distribution: after the temperature, the fewest likeliest tokens that reach top_p.
"""

from paged import LLM, SamplingParams

PROMPTS = ["The with statement is used to", "Return a new list"]


def main() -> list[tuple[str, list[float | None]]]:
    wish = SamplingParams(temperature=0.6, top_p=0.9, seed=1, max_tokens=16, logprobs=0, prompt_logprobs=0, echo=True)
    answers = []
    for answer in LLM().generate(PROMPTS, wish):
        (output,) = answer.outputs
        tokens = answer.prompt_token_ids + output.token_ids
        found = [*(answer.prompt_logprobs or []), *(output.logprobs or [])]
        values = [None if each is None else each[token].logprob for each, token in zip(found, tokens, strict=True)]
        print(repr(output.text))
        print("  ", " ".join("-" if value is None else f"{value:.2f}" for value in values))
        answers.append((output.text, values))
    return answers


if __name__ == "__main__":
    main()

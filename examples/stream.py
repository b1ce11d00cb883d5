"""Text as it comes, two requests at once, one of them ended early.

python examples/stream.py
"""

from paged import Engine, SamplingParams
from paged.model.checkpoint import checkpoint_path


def main() -> dict[str, str]:
    engine = Engine(checkpoint_path(), num_blocks=64)
    engine.add_request("The with statement", SamplingParams(max_tokens=40), id="greedy")
    engine.add_request("A list of", SamplingParams(max_tokens=400, temperature=0.8, top_p=0.9, seed=7), id="drawn")
    texts = {"greedy": "", "drawn": ""}
    while engine.has_unfinished:
        for output in engine.step():
            texts[output.id] += output.text
            print(f"{output.id:7} {output.text!r} {output.finish_reason or ''}")
        if len(texts["drawn"]) > 60:
            engine.abort("drawn")
    return texts


if __name__ == "__main__":
    main()

"""What experts in C save mixtures of experts, held against an earlier commit that ran them row by row.

    git worktree add /tmp/before 5293ab8
    python benchmarks/experts.py /tmp/before      # writes results/experts.md

Timed as recurrences.py times its models.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from recurrences import COMMON, write_page

RESULTS = Path(__file__).resolve().parent / "results" / "experts.md"
app = typer.Typer(add_completion=False)
MODELS: dict[str, dict[str, Any]] = {
    "like Mixtral: 2 of 8 experts, 54 M": {
        **COMMON,
        "model_type": "mixtral",
        "intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "like Qwen3-MoE: 8 of 64 experts, 79 M": {
        **COMMON,
        "model_type": "qwen3_moe",
        "intermediate_size": 1536,
        "moe_intermediate_size": 192,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}
WORDS = """Hidden size 512, four layers, random weights: `MODELS` in the script. Both run in tiles of 32 places now, padding included but for products and experts, so that one
row costs more than its share. Random routing spreads rows over all experts, as far as there are enough.
"""


@app.command()
def main(before: Annotated[Path, typer.Argument(help="A checkout of the earlier commit.")], rounds: int = 5) -> None:
    """Time both, and write the page."""
    command = ["git worktree add /tmp/before 5293ab8", "python benchmarks/experts.py /tmp/before"]
    write_page(RESULTS, "Experts in C", before, rounds, MODELS, command, WORDS)


if __name__ == "__main__":
    app()

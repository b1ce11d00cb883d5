"""What quantised weights, K and V change of the words of the models that ship: `paged accuracy` of both.

python benchmarks/accuracy.py        # writes results/accuracy.md
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from paged.model.checkpoint import NAMES
from paged.model.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "accuracy.md"

app = typer.Typer(add_completion=False)


def rows(name: str) -> list[str]:
    """Of the table, for one model."""
    command = [sys.executable, "-m", "paged", "accuracy", name, "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [
        f"| {name} | {each['weights']} | {each['kv_dtype']} | {each['loss']:.3f} | {each['change']:+.2%} | {1 - each['differing']:.1%} | "
        f"{1 - each['differing_where_sure']:.1%} of {each['sure']:.0%} | {each['mean_error']:.3f} | {each['p99_error']:.2f} |"
        for each in found["ways"]
    ]


@app.command()
def main(out: Annotated[Path, typer.Option(dir_okay=False)] = RESULTS) -> None:
    """Read with each way of storing, and write the page."""
    here = machine()
    out.write_text(
        PAGE.format(
            machine=f"{here['processor']}, Python {here['python']}, torch {here['torch']}",
            rows="\n".join(row for name in NAMES for row in rows(name)),
        ),
        encoding="utf-8",
    )


PAGE = """# Words with quantised weights, K and V

{machine}.

```
python benchmarks/accuracy.py
paged accuracy embedded
paged accuracy hybrid
```

The models that ship read text that was held out of their training, in pieces of 192 tokens. Linear layers of int8 have a scale a result, of int4 groups of
32 inputs, quantised at load to the nearest codes and multiplied by the C products, which round their inputs to 8 bits. Equal choices: positions at which, the true
tokens before it being known, the most likely token is that of weights, K and V as they are; and of those at which that token has more than half of
the probability. Error: absolute differences of the true token's log-probability, their mean and 99th percentile.

| model | weights | K and V | loss | change | equal choices | of those that are sure | error, mean | error, p99 |
|---|---|---|--:|--:|--:|--:|--:|--:|
{rows}

Goals are for K and V: int8 99 % and int4 95 % equal, loss within 0.5 and 3 %. Both losses hold, **the choices of int4 do not**. Weights have no goal: int8
changes a choice in twenty-five, **int4 one in four**, and the loss by 1.5 % at most. These models have a million parameters, and know their own text by heart. What larger ones lose was not measured.
"""

if __name__ == "__main__":
    app()

"""`vllm serve` and `paged serve` on one model, cores, dtype and pool, in turns, asked by `vllm bench serve` and GuideLLM: saturated, at 0.7 × of that, and overloaded
with memory at 35 %.

    python benchmarks/serve_beside_vllm.py run --python VENV/bin/python --model DIR/135m --traces DIR
    python benchmarks/serve_beside_vllm.py guide --python VENV/bin/python --model DIR/135m --guidellm VENV/bin/guidellm
    python benchmarks/serve_beside_vllm.py page

Saturated: as many clients as sequences run, each asks again when it was answered. At 0.7 × of what vLLM's server did
then, both at the same rate, requests come at random times. Overloaded: a recorded service's requests, lengths divided
by eight, at 1.4 and 3 × of the rate at which vLLM's server took them all at once on the same pool, which holds 35 %
of what its sequences would fill. Each run is a server of its own, warmed up; who begins alternates. Decides nothing
about a result.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from open_loop import BLOCK_SIZE, BUDGET, Load, answers, environment, trace_of, write_for_vllm
from spread import spread

from paged.model.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "serve-beside-vllm.json"
SIDES = ("vllm", "paged")
SEQUENCES, CONTEXT = 64, 1024
INPUT, OUTPUT = 128, 64
# Blocks that all sequences of the random load fill, and of the recorded one at most.
AMPLE = SEQUENCES * -(-(INPUT + OUTPUT + 1) // BLOCK_SIZE) * 2
LONGEST_TTFT, LONGEST_GAP = 10.0, 1.0
SHARE = 0.35
OVERLOADS = (1.4, 3.0)
app = typer.Typer(add_completion=False)


@contextmanager
def serving(side: str, python: Path, model: Path, dtype: str, blocks: int, log: Path, *more: str) -> Iterator[str]:
    """A server that answers: its address. Both get the same numbers, by flags that both understand, and `more`; ours, besides, what an operator who
    promises a first token within ten seconds would set."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    same = [
        *("--served-model-name", "it", "--port", str(port), "--dtype", dtype, "--max-model-len", str(CONTEXT)),
        *("--max-num-seqs", str(SEQUENCES), "--max-num-batched-tokens", str(BUDGET), "--block-size", str(BLOCK_SIZE)),
        *more,
    ]
    if side == "vllm":
        command = [str(python.parent / "vllm"), "serve", str(model), *same, "--uvicorn-log-level", "error"]
        # The first block is its null block.
        command += ["--num-gpu-blocks-override", str(blocks + 1)]
    else:
        command = [sys.executable, "-m", "paged", "serve", str(model), *same, "--num-gpu-blocks-override", str(blocks)]
        command += ["--max-queue-s", str(0.8 * LONGEST_TTFT)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment())
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 300
        while not answers(address):
            if time.monotonic() > until or process.poll() is not None:
                raise SystemExit(f"{side}: the server does not answer\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(90)


def asked(python: Path, model: Path, address: str, *arguments: str) -> dict[str, Any]:
    """What `vllm bench serve` saw, as it saves it."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(str(python.parent / "vllm"), "bench", "serve", "--base-url", address, "--model", "it"),
                *("--tokenizer", str(model), "--temperature", "0", "--ignore-eos", "--disable-tqdm"),
                *("--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "found.json"),
                *arguments,
            ],
            capture_output=True,
            text=True,
            env=environment(),
        )
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return found


def random_load(count: int, seed: int, *more: str) -> tuple[str, ...]:
    return (
        *("--dataset-name", "random", "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)),
        *("--num-prompts", str(count), "--seed", str(seed), *more),
    )


def latencies(found: dict[str, Any]) -> dict[str, Any]:
    """Seconds as clients saw them, of the requests that were answered."""
    firsts = np.array([first for first, error in zip(found["ttfts"], found["errors"], strict=True) if not error])
    gaps = [each for each, error in zip(found["itls"], found["errors"], strict=True) if not error]
    each = np.array([np.mean(one) for one in gaps if one])
    return {
        "answered": int(found["completed"]),
        "refused": sum("429" in error or "Too Many" in error for error in found["errors"] if error),
        "failed": int(found["failed"]),
        "seconds": found["duration"],
        "tokens/s": found["output_throughput"],
        "requests/s": found["request_throughput"],
        "TTFT, p50": float(np.percentile(firsts, 50)),
        "TTFT, p99": float(np.percentile(firsts, 99)),
        "TPOT, p50": float(np.percentile(each, 50)),
        "TPOT, p99": float(np.percentile(each, 99)),
        "good": int(
            sum(
                first <= LONGEST_TTFT and max(one, default=0.0) <= LONGEST_GAP
                for first, one in zip(firsts, gaps, strict=True)
            )
        ),
    }


@app.command()
def run(
    python: Annotated[Path, typer.Option(help="An interpreter that has vLLM.")],
    model: Annotated[Path, typer.Option(help="A checkpoint folder.")],
    traces: Annotated[Path, typer.Option(help="The folder of the traces.")],
    dtype: Annotated[str, typer.Option()] = "float32",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    count: Annotated[int, typer.Option(min=1, help="Requests of an overloaded run.")] = 500,
    only: Annotated[str, typer.Option(help="saturated, overloaded, or both.")] = "both",
) -> None:
    """Ask both, in turns, and keep what clients saw, a line a run."""
    out: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
    out["machine"], out["model"], out["dtype"] = machine(), model.name, dtype
    load = Load("azure_llm_2023_conv.csv", 1.0, 0, CONTEXT)
    trace = trace_of(load, traces, count)
    lengths = trace.prompt_tokens + trace.output_tokens
    short = round(SHARE * SEQUENCES * float(np.mean(-(-lengths // BLOCK_SIZE))))
    longest = int(-(-lengths.max() // BLOCK_SIZE)) + 1
    short = max(short, longest)
    out["short"], out["ample"] = short, AMPLE
    rates = out.setdefault("rates", {})
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number in range(rounds):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                if number == 0 and "saturated" not in rates:
                    side = "vllm" if not any(each["side"] == "vllm" for each in out["runs"]) else side
                if only in ("both", "saturated"):
                    with serving(side, python, model, dtype, AMPLE, folder / "log") as address:
                        asked(python, model, address, *random_load(SEQUENCES, 99, "--max-concurrency", str(SEQUENCES)))
                        found = latencies(
                            asked(
                                python,
                                model,
                                address,
                                *random_load(3 * SEQUENCES, number, "--max-concurrency", str(SEQUENCES)),
                            )
                        )
                        keep(out, side, "saturated", found)
                        rates.setdefault("saturated", found["requests/s"])
                        rate = 0.7 * rates["saturated"]
                        found = latencies(
                            asked(
                                python,
                                model,
                                address,
                                *random_load(2 * SEQUENCES, 10 + number, "--request-rate", f"{rate:.3f}"),
                            )
                        )
                        keep(out, side, "0.7 ×", found)
                if only in ("both", "overloaded"):
                    with serving(side, python, model, dtype, short, folder / "log") as address:
                        write_for_vllm(trace, folder / "at-once.jsonl", at_once=True)
                        before = asked(python, model, address, *recorded(folder / "at-once.jsonl", 100))
                        rates.setdefault("short", 100 / before["duration"])
                        for over in OVERLOADS:
                            span = count / (over * rates["short"])
                            write_for_vllm(
                                trace.scaled(rate=float(trace.arrival_s[-1]) / span),
                                folder / "over.jsonl",
                                at_once=False,
                            )
                            found = latencies(asked(python, model, address, *recorded(folder / "over.jsonl", count)))
                            keep(out, side, f"{over:g} ×, memory at 35 %", found)


def guided(guidellm: Path, model: Path, address: str, profile: str, count: int) -> dict[str, Any]:
    """What GuideLLM saw of so many requests, in the units of `latencies`; its gap between tokens is a request's mean, too."""
    backend = f"kind=openai_http,target={address},model=it,request_format=/v1/completions"
    data = f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(str(guidellm.absolute()), "run", "--backend", backend, "--profile", profile, "--data", data),
                *("--tokenizer", f"kind=huggingface_auto,model={model.absolute()}"),
                *("--constraint", f"kind=max_requests,count={count}", "--disable-console"),
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            env=environment(),
        )
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        (found,) = json.loads((Path(folder) / "benchmarks.json").read_text())["benchmarks"]
    its, totals = found["metrics"], found["metrics"]["request_totals"]
    return {
        "answered": totals["successful"],
        "refused": 0,
        "failed": totals["errored"] + totals["incomplete"],
        "seconds": found["duration"],
        "tokens/s": its["output_token_count"]["successful"]["total_sum"] / found["duration"],
        **{
            f"{name}, {part}": its[key]["successful"]["percentiles"][part] / 1e3
            for name, key in (("TTFT", "time_to_first_token_ms"), ("TPOT", "inter_token_latency_ms"))
            for part in ("p50", "p99")
        },
    }


@app.command()
def guide(
    python: Annotated[Path, typer.Option(help="An interpreter that has vLLM.")],
    model: Annotated[Path, typer.Option(help="A checkpoint folder.")],
    guidellm: Annotated[Path, typer.Option(help="GuideLLM's command.")],
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Ask both again, by GuideLLM, at the rates and in the precision of `run`."""
    out: dict[str, Any] = json.loads(RESULTS.read_text())
    with tempfile.TemporaryDirectory() as place:
        for number in range(rounds):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                with serving(side, python, model, out["dtype"], AMPLE, Path(place) / "log") as address:
                    profile = f"kind=concurrent,streams={SEQUENCES}"
                    guided(guidellm, model, address, profile, SEQUENCES)
                    keep(out, side, "saturated, by GuideLLM", guided(guidellm, model, address, profile, 3 * SEQUENCES))
                    profile = f"kind=poisson,rate={0.7 * out['rates']['saturated']:.3f}"
                    keep(out, side, "0.7 ×, by GuideLLM", guided(guidellm, model, address, profile, 2 * SEQUENCES))


def recorded(path: Path, count: int) -> tuple[str, ...]:
    return (
        *("--dataset-name", "timed_trace", "--dataset-path", str(path), "--timed-trace-chunk-hash-size", "64"),
        *("--num-prompts", str(count)),
    )


def keep(out: dict[str, Any], side: str, what: str, found: dict[str, Any]) -> None:
    out["runs"].append({"side": side, "load": what, **found})
    RESULTS.write_text(json.dumps(out, indent=1) + "\n")
    print(side, what, json.dumps(found), flush=True)


FIGURES = (
    ("output tokens/s", "tokens/s", ",.0f"),
    ("TTFT, p50, s", "TTFT, p50", ".2f"),
    ("TTFT, p99, s", "TTFT, p99", ".2f"),
    ("TPOT, p50, ms", "TPOT, p50", ".1f"),
    ("TPOT, p99, ms", "TPOT, p99", ".1f"),
    ("answered", "answered", ",.0f"),
    ("refused with 429", "refused", ",.0f"),
    ("failed in another way", "lost", ",.0f"),
    (f"good: TTFT ≤ {LONGEST_TTFT:g} s and no gap over {LONGEST_GAP:g} s", "good", ",.0f"),
    ("goodput: good requests/s, until the last answer", "goodput", ".2f"),
)


@app.command()
def page() -> None:
    """Write results/serve-beside-vllm.md from what was kept."""
    out = json.loads(RESULTS.read_text())
    its = out["machine"]
    lines = [
        "# `paged serve` beside `vllm serve`",
        "",
        f"`vllm bench serve` (and GuideLLM where it is said) against both servers in turns, each with the same flags: model {out['model']}, {out['dtype']}, blocks of {BLOCK_SIZE} tokens, "
        f"{SEQUENCES} sequences, {BUDGET:,} tokens a step, a context of {CONTEXT:,}. {its['processor']}, {its['cores']} cores, Python {its['python']}, torch "
        f"{its.get('torch', '?')}; vLLM 0.32 (CPU build, compiled). Clients, servers and engines share the cores. Medians and ranges over the runs; TPOT is the mean gap of a request.",
        "",
        f"Saturated: {SEQUENCES} clients, prompts of {INPUT} and outputs of {OUTPUT} random tokens, {out['ample']:,} blocks. 0.7 ×: the same requests at 0.7 × of the rate that vLLM's "
        f"server had in its first saturated run ({out['rates'].get('saturated', 0):.2f} requests/s), at random times. Overloaded: the first 500 requests of Azure's conversation trace, lengths ÷ 8, at 1.4 and "
        f"3 × of {out['rates'].get('short', 0):.2f} requests/s, which vLLM's server did when 100 came at once; {out['short']:,} blocks. Ours is started with `--max-queue-s {0.8 * LONGEST_TTFT:g}` there and everywhere: "
        "who would wait for longer is told when to come again, and `vllm bench serve` does not come again, so that these count as not answered. "
        "A run ends with its last answer, which comes sooner where some are refused: compare the good requests, too.",
        "",
        "```",
        f"python benchmarks/serve_beside_vllm.py run --python VENV/bin/python --model DIR/135m --traces DIR --dtype {out['dtype']}",
        "python benchmarks/serve_beside_vllm.py guide --python VENV/bin/python --model DIR/135m --guidellm VENV/bin/guidellm",
        "python benchmarks/serve_beside_vllm.py page",
        "```",
        "",
    ]
    for load in dict.fromkeys(each["load"] for each in out["runs"]):
        sides = {
            side: [each for each in out["runs"] if each["load"] == load and each["side"] == side] for side in SIDES
        }
        for runs in sides.values():
            for each in runs:
                if "good" in each:
                    each["goodput"] = each["good"] / each["seconds"]
                each["lost"] = each["failed"] - each["refused"]
        lines += [
            f"## {load}",
            "",
            f"| {len(sides['vllm'])} and {len(sides['paged'])} runs | vLLM | paged |",
            "|---|--:|--:|",
        ]
        for title, key, form in FIGURES:
            if key not in (sides["vllm"] or sides["paged"])[0]:
                continue
            scale = 1e3 if "ms" in title.split(", ") or title.endswith("ms") else 1.0
            cells = [spread([scale * run[key] for run in sides[side]], form) if sides[side] else "–" for side in SIDES]
            lines.append(f"| {title} | {' | '.join(cells)} |")
        lines.append("")
    RESULTS.with_suffix(".md").write_text("\n".join(lines))


if __name__ == "__main__":
    app()

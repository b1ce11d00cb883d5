"""What only a GPU can show: attention against the reference, answers under pressure, one step ahead, copies, decoding, models of 8 and 20 billion.

    make gpu                                            # on a machine with CUDA; writes results/gpu.md
    python benchmarks/on_gpu.py --device cpu --small    # the same code on a stand-in, in a minute; writes nothing

Each part is a process of its own, so that one that takes the device down with it ends no other. A part that fails or runs past its time is a row that
says so. The script needs no package that `pip install '.[cli,engine]'` does not bring; xformers is used where it is there.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, groupby
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

from paged import SamplingParams
from paged.attention import KVPool, LayerOptions, LayerShape, StepTokens, get_backend, known_backends
from paged.attention.pages import Pages
from paged.engine.engine import Engine
from paged.errors import UnsupportedByBackend
from paged.model.hook import ATTENTION, register
from paged.model.loading import LoadedModel, as_loaded, load_model
from paged.model.machine import machine
from paged.model.model_shape import ModelShape
from paged.model.random_weights import random_model
from paged.model.runner import can_be_captured
from paged.study.hardware import model_named
from paged.testing.engine_world import EngineRequest, EngineWorld
from paged.testing.pressure import answers_of

RESULTS = Path(__file__).resolve().parent / "results" / "gpu.md"
DEVICE, SMALL = "cuda", False
# As the backends' own tests bound them, for values of size 1.
TOLERANCES = {torch.float32: 5e-6, torch.float16: 2 * 2**-10, torch.bfloat16: 2 * 2**-7}
TINY = ModelShape(
    name="tiny",
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocab=512,
    max_length=2048,
    source="made up",
)
Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Part:
    """What is tried, in how many seconds at most, and what is expected of it. Those that are not timed run beside each other."""

    run: Callable[[], Rows]
    seconds: int
    wanted: str
    is_timed: bool = True


def synchronised() -> float:
    """Seconds of the clock, once all that was launched is done."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each round after one that is not counted."""
    work()
    found = []
    for _ in range(rounds):
        began = synchronised()
        work()
        found.append(synchronised() - began)
    return found


def spread(values: list[float], form: str = ".2f") -> str:
    """The median, and the least and the most behind it."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def judged(is_met: bool) -> str:
    """What a rate comes to; of a stand-in it says nothing."""
    return "" if DEVICE != "cuda" else "held: " if is_met else "MISSED: "


def backends(layers: LayerShape, *, invariant: bool = False) -> Iterator[tuple[str, Any]]:
    """Those that can do such layers on the device, and the reasons of those that cannot, by name."""
    for name in known_backends():
        try:
            found = get_backend(name, invariant=invariant)
            found.check(layers)
        except UnsupportedByBackend as error:
            yield name, str(error)
        else:
            yield name, found


def invariant_ones(layers: LayerShape) -> Iterator[tuple[str, Any]]:
    """As `backends`: those with an invariant mode of their own, in it."""
    for name, backend in backends(layers, invariant=True):
        if name != "reference" and not isinstance(backend, str):
            yield f"{name}, invariant", backend


def paged_step(counts: list[int], lengths: list[int], block_size: int) -> tuple[StepTokens, int]:
    """The last `counts` tokens of sequences of these lengths whose blocks lie in random order, and how many blocks there are."""
    num_new, seq_lens = np.array(counts), np.array(lengths)
    columns = -(-seq_lens // block_size)
    order = np.random.default_rng(0).permutation(int(columns.sum())).astype(np.int32)
    tables = np.zeros((len(counts), int(columns.max())), np.int32)
    for row, (end, size) in enumerate(zip(columns.cumsum().tolist(), columns.tolist(), strict=True)):
        tables[row, :size] = order[end - size : end]
    starts = np.append(0, num_new.cumsum())
    owners = np.arange(len(counts)).repeat(num_new)
    positions = np.arange(starts[-1]) - starts[owners] + (seq_lens - num_new)[owners]
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return StepTokens(positions, slots, starts, seq_lens, tables, block_size), int(columns.sum())


def filled_pool(layers: LayerShape, num_blocks: int, num_layers: int = 1) -> KVPool:
    """Drawn K and V, the same numbers on every device."""
    pool = KVPool(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=layers.block_size,
        num_kv_heads=layers.num_kv_heads,
        head_dim=layers.head_dim,
        dtype=layers.dtype,
        device=layers.device,
    )
    slots = torch.arange(num_blocks * layers.block_size)
    size = (2, len(slots), layers.num_kv_heads, layers.head_dim)
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(layers.dtype).to(layers.device)
    for layer in range(num_layers):
        pool.write_kv(layer, slots.to(layers.device), *numbers)
    return pool


@torch.inference_mode()
def attention() -> Rows:
    """Every backend on the device against `reference` on the processor: plain, within a window, and with all that a layer can ask for."""
    shapes = [(4, 2, 16)] if SMALL else [(32, 8, 128), (9, 3, 64)]
    lengths = [5, 16, 17, 40] if SMALL else [5, 16, 17, 63, 64, 65, 1100]
    steps = {"decode": [1] * len(lengths), "prefill": [min(each, 40) for each in lengths]}
    # The reference computes token by token; more threads only wait for each other.
    torch.set_num_threads(1)
    left_out: dict[str, set[str]] = {}
    worst: dict[str, float] = {}
    for heads, kv_heads, size in shapes:
        for dtype, bound in TOLERANCES.items():
            here = LayerShape(heads, kv_heads, size, 16, dtype, torch.device("cpu"))
            for window, has_all in ((None, False), (20, False), (300, True)):
                there = replace(here, device=torch.device(DEVICE), has_soft_cap=has_all, has_sinks=has_all)
                sinks = torch.linspace(-2, 2, heads).to(dtype) if has_all else None
                options = LayerOptions(size**-0.5, window, 5.0 if has_all else None, sinks)
                on_device = replace(options, sinks=None if sinks is None else sinks.to(DEVICE))
                for counts in steps.values():
                    step, num_blocks = paged_step(counts, lengths, 16)
                    queries = torch.randn(step.num_tokens, heads, size, generator=torch.Generator().manual_seed(1)).to(
                        dtype
                    )
                    truth_pool, pool = filled_pool(here, num_blocks), filled_pool(there, num_blocks)
                    reference = get_backend("reference")
                    truth = reference.attend(queries, truth_pool, 0, reference.prepare(step, truth_pool), options)
                    for name, backend in [*backends(there), *invariant_ones(there)]:
                        if isinstance(backend, str):
                            left_out.setdefault(name, set()).add(backend)
                            continue
                        its = backend.attend(queries.to(DEVICE), pool, 0, backend.prepare(step, pool), on_device).cpu()
                        error = (its.double() - truth.double()).abs() / (bound * (1 + truth.double().abs()))
                        worst[name] = max(worst.get(name, 0.0), float(error.max()))
    verdicts = {
        name: [f"{'held' if value <= 1 else 'MISSED'}: at most {value:.2f} of the bound"]
        for name, value in worst.items()
    }
    return [
        (name, "; ".join(verdicts.get(name, []) + [f"not tried: {each}" for each in sorted(left_out.get(name, ()))]))
        for name in sorted({*worst, *left_out})
    ]


@torch.inference_mode()
def bits() -> Rows:
    """The batch-invariant mode of our kernels: a prompt in one step against tokens of it alone, and in chunks, which are computed by other kernels."""
    refused = dict(backends(LayerShape(32, 8, 128, 16, torch.float32, torch.device(DEVICE)), invariant=True))["triton"]
    if isinstance(refused, str):
        return [("triton", f"not tried: {refused}")]
    length, firsts = (40, (0, 1, 39)) if SMALL else (3000, (0, 1, 255, 511, 512, 513, 1000, 2047, 2900, 2999))
    found: Rows = []
    for dtype in (torch.float32, torch.float16) if DEVICE == "cpu" else TOLERANCES:
        layers = LayerShape(32, 8, 128, 16, dtype, torch.device(DEVICE))
        same = total = 0
        for options in (LayerOptions(0.09), LayerOptions(0.09, 300, 5.0)):
            step, num_blocks = paged_step([length], [length], 16)
            pool, backend = filled_pool(layers, num_blocks), get_backend("triton", invariant=True)
            queries = torch.randn(length, 32, 128, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
            whole = backend.attend(queries, pool, 0, backend.prepare(step, pool), options)
            for first in firsts:
                for stop in (first + 1, min(length, first + 40)):
                    part = step.part(first, stop)
                    its = backend.attend(queries[first:stop], pool, 0, backend.prepare(part, pool), options)
                    same, total = same + its.equal(whole[first:stop]), total + 1
        found.append((str(dtype), f"{'held' if same == total else 'MISSED'}: {same} of {total} equal to the last bit"))
    return found


def families() -> Rows:
    """Small models of some families: transformers' own answers on the same device, with ample memory and with too little."""
    sys.path.insert(0, str(RESULTS.parents[2]))
    from conformance.architectures import tried as tried_family

    names = ["llama"] if SMALL else ["llama", "gpt_oss", "gemma3_text", "qwen3_next", "mamba2", "deepseek_v3"]
    with ThreadPoolExecutor(len(names)) as pool:
        verdicts = list(pool.map(partial(tried_family, device=DEVICE), names))
    return [
        (
            each.name,
            f"{'held' if each.outcome == 'equal' else 'MISSED'}: {each.outcome}; logits off by {each.off:.0e} of the largest, under pressure "
            f"{each.pressed:.0e}; {each.preempted} requests preempted. {each.why}".strip(),
        )
        for each in verdicts
    ]


CAPTURED = [
    "llama",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "cohere2",
    "llama4_text",
    "olmo3",
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
    "qwen3_next",
    "olmo_hybrid",
    "mamba2",
    "falcon_mamba",
    "jamba",
    "bamba",
    "nemotron_h",
    "granitemoehybrid",
    "falcon_h1",
    "lfm2",
    "minimax",
    "recurrent_gemma",
    "rwkv",
    "zamba2",
    "xlstm",
]
"""Families whose decodes are to be captured: layers in groups, states, experts."""


def captured_family(name: str, device: str) -> tuple[str, str]:
    """A small model of the family, in float32, or in bfloat16 if that is what it can be captured in: decodes captured and launched, not batch-invariant."""
    sys.path.insert(0, str(RESULTS.parents[2]))
    from conformance.one_architecture import families as rows, save

    torch.backends.cuda.matmul.allow_tf32 = False
    caught = warnings.catch_warnings(record=True)
    with stand_in_for(device, small=True), tempfile.TemporaryDirectory() as folder, caught as said:
        warnings.simplefilter("always")
        save(rows()[name], Path(folder))
        model = load_model(folder, device=device)
        if not can_be_captured(model):
            model = load_model(folder, device=device, dtype="bfloat16")
        prompts = [
            np.random.default_rng(seed).integers(3, model.vocabulary_size, 5 + 3 * seed).tolist() for seed in range(6)
        ]
        config: dict[str, Any] = {"num_blocks": 500, "block_size": 4, "max_sequences": 6, "batch_invariant": False}
        answers, graphs = [], 0
        for is_eager in (True, False):
            engine = Engine(model, **config, enforce_eager=is_eager)
            answers.append(served(engine, prompts, 20)[2])
            graphs += len(getattr(getattr(engine.runner, "_captured", None), "graphs", ()))
            engine.close()
    why = [str(each.message) for each in said if "uncaptured" in str(each.message)]
    same = sum(a == b for a, b in zip(*answers, strict=True))
    begin = min(same_beginning(*both) for both in zip(*answers, strict=True))
    # In bfloat16 products round by their rows; an answer may part later.
    is_held = (graphs or device == "cpu") and (same == len(prompts) or (model.dtype == torch.bfloat16 and begin > 0))
    said_so = "; ".join([f"{graphs} graphs, {same} of {len(prompts)} answers as when launched", str(model.dtype), *why])
    return name, f"{'held' if is_held else 'MISSED'}: {said_so}"


def captures() -> Rows:
    """Small models of families whose decodes can be captured, each in a process of its own."""
    names = ["llama"] if SMALL else CAPTURED
    found: Rows = []
    with ProcessPoolExecutor(8, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for name, result in [(name, pool.submit(captured_family, name, DEVICE)) for name in names]:
            try:
                found.append(result.result())
            except Exception as error:
                found.append((name, f"FAILED: {str(error)[:200]}"))
    return found


def small_model() -> LoadedModel:
    """The model that ships, on the device, in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return load_model("embedded", dtype="float32", device=DEVICE)


def drawn_requests(seed: int, vocabulary: int) -> list[EngineRequest]:
    """Eight that share beginnings and grow into each other's memory."""
    chance = random.Random(seed)
    texts = [[chance.randrange(3, vocabulary) for _ in range(60)] for _ in range(2)]
    return [
        EngineRequest(
            id=str(each), prompt=chance.choice(texts)[: chance.randint(5, 60)], max_tokens=chance.choice([4, 12, 20])
        )
        for each in range(8)
    ]


def pressure() -> Rows:
    """Answers on a pool that is far too small, with swaps, against each request alone."""
    model, rows = small_model(), []
    for ahead in (0, 1):
        tokens = logits = total = preempted = 0
        violations: list[str] = []
        off = 0.0
        for seed in range(2 if SMALL else 10):
            requests = drawn_requests(seed, model.vocabulary_size)
            pressed = _engine(model, EngineWorld(num_blocks=8, block_size=16, host_blocks=16), ahead)
            tight = answers_of(pressed, requests)
            violations += tight.violations
            its = pressed.scheduler.stats()
            preempted += its.preemptions_recompute + its.preemptions_swap
            for request in requests:
                alone = answers_of(_engine(model, EngineWorld(num_blocks=32, block_size=16), 0), [request])
                who = (request.id, 0)
                total += 1
                tokens += alone.tokens[who] == tight.tokens[who]
                pairs = list(zip(alone.logits[who], tight.logits[who], strict=False))
                logits += all(a.tobytes() == b.tobytes() for a, b in pairs)
                off = max(off, *(float(np.abs(a - b).max()) for a, b in pairs))
        rows.append(
            (
                f"steps_ahead={ahead}",
                f"{'held' if tokens == total and not violations else 'MISSED'}: tokens of {tokens} of {total} answers equal, logits to the last bit of "
                f"{logits}, apart by at most {off:.2g}; {preempted} preemptions, {len(violations)} violations",
            )
        )
    return rows


def _engine(model: LoadedModel, world: EngineWorld, ahead: int) -> Engine:
    return Engine(
        model,
        num_blocks=world.num_blocks,
        block_size=world.block_size,
        host_blocks=world.host_blocks,
        host_caching=world.host_blocks > 0,
        max_tokens_per_step=64,
        max_sequences=8,
        steps_ahead=ahead,
        batch_invariant=True,
    )


def big_model() -> LoadedModel:
    """Llama 3's shape of 8 billion parameters with random weights, in bfloat16."""
    return random_model(
        TINY if SMALL else model_named("llama-3-8b"), dtype="float32" if SMALL else "bfloat16", device=DEVICE
    )


def served(engine: Engine, prompts: list[list[int]], outputs: int) -> tuple[float, list[float], list[list[int]]]:
    """Seconds of all of them together and of each step, and their tokens."""
    params = SamplingParams(max_tokens=outputs, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    began = synchronised()
    for number, prompt in enumerate(prompts):
        tokens[engine.add_request(prompt, params, id=str(number))] = []
    steps = []
    while engine.has_unfinished:
        before = time.perf_counter()
        for output in engine.step():
            tokens[output.id] += output.token_ids
        steps.append(time.perf_counter() - before)
    return synchronised() - began, steps, list(tokens.values())


def same_beginning(one: list[int], other: list[int]) -> int:
    """Tokens that both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def prompts_of(model: LoadedModel, rows: int, length: int) -> list[list[int]]:
    """Drawn tokens."""
    return np.random.default_rng(0).integers(3, model.vocabulary_size, (rows, length)).tolist()


def rates(model: LoadedModel, ways: dict[str, dict[str, Any]]) -> tuple[Rows, list[float]]:
    """Output tokens a second at 64 rows in each of these ways, of which the first launches each kernel, in turns; and the medians."""
    rows, length, outputs = (4, 16, 8) if SMALL else (64, 256, 64)
    prompts = prompts_of(model, rows, length)
    config = {"num_blocks": 8 * rows * (length + outputs) // 16, "block_size": 16, "max_sequences": rows}
    answers: dict[str, list[list[int]]] = {}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    shares: dict[str, float] = {}
    decodes: dict[str, float] = {}
    alone: dict[str, list[float]] = {}
    # The first round compiles.
    for is_counted in (False, True, True, True):
        for way, options in ways.items():
            engine = Engine(model, **config, **{"max_tokens_per_step": 2048, "batch_invariant": False, **options})
            seconds, steps, answers[way] = served(engine, prompts, outputs)
            stats = engine.stats()
            # Behind the prompts, and before the first answer ends.
            decodes[way] = 1e3 * median(steps[-outputs // 2 : -3])
            graphs = getattr(engine.runner, "_captured", None)
            if graphs is not None and graphs.graphs:
                alone[way] = [1e3 * each for each in timed(graphs.graphs[max(graphs.graphs)].replay, 10)]
            shares[way] = stats.host_s / (stats.host_s + stats.model_s)
            rates[way] += [rows * outputs / seconds] * is_counted
            engine.close()
    first = answers[next(iter(ways))]
    found: Rows = []
    for way in ways:
        common = [same_beginning(*both) for both in zip(first, answers[way], strict=True)]
        rate = f"{spread(rates[way], ',.0f')} output tokens/s, a decode in {decodes[way]:.1f} ms; the host's share {shares[way]:.1%}"
        # A graph has the shapes of a launched decode until the first answer ends.
        same = f"{common.count(outputs)} of {rows} answers as in the first row, of each the first {min(common)} tokens"
        found.append((way, f"{rate}; {same}"))
        if way in alone:
            found.append((f"{way}: a captured decode of all rows on the GPU alone", f"{spread(alone[way], '.1f')} ms"))
    return found, [median(each) for each in rates.values()]


def model_of_8b() -> Rows:
    """Decodes captured and not, one step ahead and not, and by xformers' operator; and the batch-invariant mode, whose answers are those of requests alone."""
    model = big_model()
    ways: dict[str, dict[str, Any]] = {
        "each kernel launched": {"enforce_eager": True},
        "decodes captured": {},
        "decodes captured, one step ahead": {"steps_ahead": 1},
        "decodes captured, by xformers_splitk": {"backend": "xformers_splitk"},
    }
    if DEVICE == "cpu":
        del ways["decodes captured, by xformers_splitk"]
    found, (launched, replayed, ahead, *_) = rates(model, ways)
    return [
        *found,
        ("captured, of launched", f"{judged(replayed >= launched)}{replayed / launched:.2f}"),
        ("one step ahead, of none", f"{judged(ahead >= replayed)}{ahead / replayed:.2f}"),
        *batch_invariant(model),
    ]


def batch_invariant(model: LoadedModel) -> Rows:
    """The same prompts in the batch-invariant mode, whose tiles are captured, all together and some alone."""
    rows, length, outputs = (4, 16, 8) if SMALL else (64, 256, 64)
    prompts = prompts_of(model, rows, length)
    config = {"num_blocks": 2 * rows * (length + outputs) // 16, "block_size": 16, "max_sequences": rows}
    engine = Engine(model, **config, max_tokens_per_step=256, batch_invariant=True)
    served(engine, prompts[:1], 8)
    seconds, steps, together = served(engine, prompts, outputs)
    alone = [served(engine, [prompt], outputs)[2][0] for prompt in prompts[:: rows // 4]]
    engine.close()
    same = sum(a == b for a, b in zip(alone, together[:: rows // 4], strict=True))
    rate = (
        f"{rows * outputs / seconds:,.0f} output tokens/s, a decode in {1e3 * median(steps[-outputs // 2 : -3]):.1f} ms"
    )
    return [
        (
            "batch-invariant, tiles captured",
            f"{judged(same == len(alone))}{rate}; {same} of {len(alone)} answers those of the request alone",
        )
    ]


def model_of_experts() -> Rows:
    """gpt-oss 20B's shape with random weights, in bfloat16: windows, sinks, and four experts of 32 for each token."""
    from transformers import AutoModelForCausalLM, GptOssConfig

    sizes = {"num_hidden_layers": 24, "num_local_experts": 32}
    if SMALL:
        small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes = {"num_hidden_layers": 2, "num_local_experts": 4, "head_dim": 16, "vocab_size": 512, **small}
    config: Any = GptOssConfig(**sizes, pad_token_id=0)
    register()
    build: Any = AutoModelForCausalLM.from_config
    where = torch.device(DEVICE)
    with torch.random.fork_rng(), where:
        torch.manual_seed(0)
        module = build(config, dtype=torch.float32 if SMALL else torch.bfloat16, attn_implementation=ATTENTION)
    model = as_loaded(module.eval(), Path("gpt-oss-20b"), None, where)
    found, (launched, replayed) = rates(
        model, {"each kernel launched": {"enforce_eager": True}, "decodes captured": {}}
    )
    return [*found, ("captured, of launched", f"{judged(replayed >= launched)}{replayed / launched:.2f}")]


def beside_transformers() -> Rows:
    """The same weights under transformers' own continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    module: Any = big_model().module
    rows, length, outputs = (4, 16, 8) if SMALL else (64, 256, 64)
    prompts = np.random.default_rng(0).integers(3, module.config.vocab_size, (rows, length)).tolist()
    module.set_attn_implementation("paged|sdpa")
    greedy = GenerationConfig(max_new_tokens=outputs, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(num_blocks=4 * rows * (length + outputs) // 32, max_batch_tokens=2048)
    seconds = []
    for _ in range(2):
        began = synchronised()
        answers = module.generate_batch(prompts, generation_config=greedy, continuous_batching_config=sizes)
        seconds.append(synchronised() - began)
    tokens = sum(len(each.generated_tokens) for each in answers.values())
    if tokens != rows * outputs:
        raise RuntimeError(f"{tokens:,} tokens came instead of {rows * outputs:,}")
    return [("transformers", f"{tokens / seconds[-1]:,.0f} output tokens/s (the second of two runs)")]


def copies() -> Rows:
    """Pages that go to the host and come back, against one copy of pinned memory of the same bytes."""
    page_bytes, num_pages = (4096, 64) if SMALL else (2**18, 4096)
    pages = Pages(num_pages=num_pages, page_bytes=page_bytes, device=DEVICE, num_host_pages=num_pages)
    order = torch.from_numpy(np.random.default_rng(0).permutation(num_pages))
    pages.on_device[:num_pages] = torch.randint(0, 255, (num_pages, page_bytes), dtype=torch.uint8).to(DEVICE)
    before = pages.on_device[:num_pages].cpu()
    number_of_bytes = num_pages * page_bytes
    flat = torch.empty(num_pages, page_bytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    ways: dict[str, Callable[[], object]] = {
        "pages to the host": lambda: pages.device_to_host(order, torch.arange(num_pages)),
        "pages from the host": lambda: pages.host_to_device(torch.arange(num_pages), order),
        "pages on the device": lambda: pages.device_to_device(order, order),
        "one pinned copy to the host": lambda: flat.copy_(pages.on_device[:num_pages]),
        "one pinned copy from the host": lambda: pages.on_device[:num_pages].copy_(flat),
    }
    rates = {name: [number_of_bytes / each / 1e9 for each in timed(way, 5)] for name, way in ways.items()}
    found = [(name, f"{spread(each)} GB/s") for name, each in rates.items()]
    for way in ("to", "from"):
        share = median(rates[f"pages {way} the host"]) / median(rates[f"one pinned copy {way} the host"])
        found.append((f"{way} the host, of the pinned copy's rate", f"{judged(share >= 0.5)}{share:.2f}"))
    is_same = bool((pages.on_device[:num_pages].cpu() == before).all())
    return [("bytes there and back", "held: equal" if is_same else "MISSED: they differ"), *found]


def in_graph(work: Callable[[], object], times: int = 8) -> Callable[[], object]:
    """So many runs of it as one CUDA graph; on a stand-in they are launched."""

    def repeated() -> None:
        for _ in range(times):
            work()

    if DEVICE == "cpu":
        return repeated
    repeated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeated()
    return graph.replay


def one_layer(
    backend: Any, queries: torch.Tensor, pool: KVPool, turns: Iterator[int], plan: Any, options: LayerOptions
) -> None:
    """Attention of the next layer."""
    backend.attend(queries, pool, next(turns) % pool.num_layers, plan, options)


@torch.inference_mode()
def decode() -> Rows:
    """Attention of a decode, captured: bytes of K and V a second, over what a copy of a gigabyte on the device reads and writes."""
    heads, kv_heads, size = (4, 2, 16) if SMALL else (32, 8, 128)
    dtype = torch.float32 if SMALL else torch.bfloat16
    layers = LayerShape(heads, kv_heads, size, 16, dtype, torch.device(DEVICE))
    source = torch.empty(2**20 if SMALL else 2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copied = 2 * len(source) / median(timed(lambda: target.copy_(source), 10))
    found: Rows = [("a copy", f"{copied / 1e9:,.0f} GB/s read and written")]
    bests: dict[tuple[int, int], float] = {}
    for rows, context in [(4, 64)] if SMALL else [(64, 4096), (64, 512), (8, 16384), (1, 4096)]:
        step, num_blocks = paged_step([1] * rows, [context] * rows, 16)
        # Layers in turn, so that nothing is read from a cache.
        pool = filled_pool(layers, num_blocks, 1 if rows * context > 2**17 else 4)
        queries = torch.randn(rows, heads, size, device=DEVICE).to(dtype)
        number_of_bytes = 2 * rows * context * kv_heads * size * dtype.itemsize
        for name, backend in backends(layers):
            if isinstance(backend, str) or name == "reference":
                continue
            plan, turns = backend.prepare(step, pool), count()

            attend = partial(one_layer, backend, queries, pool, turns, plan, LayerOptions(size**-0.5))
            attend()
            seconds = [each / 8 for each in timed(in_graph(attend), 10)]
            rate = number_of_bytes / median(seconds) / copied
            bests[rows, context] = max(bests.get((rows, context), 0.0), rate)
            found.append(
                (
                    f"{rows} of {context:,}, {name}",
                    f"{spread([1e6 * each for each in seconds], ',.0f')} µs, {rate:.2f} of the copy",
                )
            )
    best = next(iter(bests.values()))
    return [*found, ("the best of the first, of the copy's rate", f"{judged(best >= 0.5)}{best:.2f}")]


PARTS = {
    "8 billion parameters": Part(
        model_of_8b, 150, "captured no slower than launched, one step ahead no slower than none"
    ),
    "experts and windows": Part(model_of_experts, 90, "captured no slower than launched"),
    "beside transformers": Part(beside_transformers, 80, "tokens/s of the same requests, to hold ours above against"),
    "attention": Part(attention, 120, "within the bound of the backends' tests", is_timed=False),
    "bits": Part(bits, 60, "equal to the last bit", is_timed=False),
    "pressure": Part(pressure, 90, "tokens equal, and logits to the last bit", is_timed=False),
    "families": Part(families, 120, "tokens equal to transformers', and under pressure to those alone", is_timed=False),
    "captures": Part(captures, 150, "graphs, and the same answers in float32", is_timed=False),
    "copies": Part(copies, 45, "half of a pinned copy's rate"),
    "decode": Part(decode, 45, "half of a copy's rate"),
}


@contextmanager
def stand_in_for(device: str, small: bool) -> Iterator[None]:
    """Run parts on this device, at their small sizes or not."""
    global DEVICE, SMALL
    before = DEVICE, SMALL
    DEVICE, SMALL = device, small
    try:
        yield
    finally:
        DEVICE, SMALL = before


def tried(name: str, flags: list[str]) -> tuple[Rows, float]:
    """One part in a process of its own, and its seconds."""
    part, began = PARTS[name], time.perf_counter()
    command = [sys.executable, __file__, "--part", name, *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=part.seconds, check=False)
    except subprocess.TimeoutExpired:
        return [(name, f"FAILED: not done within {part.seconds} s")], time.perf_counter() - began
    seconds = time.perf_counter() - began
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return [(name, f"FAILED: {last[:300]}")], seconds
    return [tuple(each) for each in json.loads(done.stdout.splitlines()[-1])], seconds


def page(found: dict[str, tuple[Rows, float]], device: str) -> str:
    """The results, as Markdown."""
    about = machine()
    if device == "cuda":
        about["device"] = torch.cuda.get_device_name()
        about["CUDA"] = str(torch.version.cuda)
    lines = [
        "# On a GPU",
        "",
        f"{', '.join(f'{name} {value}' for name, value in about.items())}.",
        "",
        "```",
        "make gpu",
        "```",
        "",
    ]
    for name, (rows, seconds) in found.items():
        lines += [f"## {name[0].upper()}{name[1:]}", "", f"Wanted: {PARTS[name].wanted}. It took {seconds:.0f} s.", ""]
        lines += ["| what | found |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows), ""]
    return "\n".join(lines)


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu as a stand-in, whose page goes to the terminal.")] = "cuda",
    small: Annotated[bool, typer.Option(help="Sizes for a stand-in.")] = False,
    part: Annotated[str | None, typer.Option(help=f"One of {', '.join(PARTS)}; its rows as JSON.")] = None,
) -> None:
    """Try what only a GPU can show, and write it down."""
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "No CUDA device here; --device cpu --small runs the same on a stand-in, and shows nothing about a GPU."
        )
    if part is not None:
        with stand_in_for(device, small):
            print(json.dumps(PARTS[part].run()))
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    flags = ["--device", device, *(["--small"] if small else [])]
    found: dict[str, tuple[Rows, float]] = {}
    for is_timed, group in groupby(PARTS, key=lambda name: PARTS[name].is_timed):
        names = list(group)
        with ThreadPoolExecutor(1 if is_timed else len(names)) as pool:
            for name, result in zip(names, pool.map(partial(tried, flags=flags), names), strict=True):
                found[name] = result
                if device == "cuda":
                    # As far as it has come: the machine may be there for a while only.
                    RESULTS.write_text(page(found, device), encoding="utf-8")
    print(page(found, device))
    if any("FAILED" in value or "MISSED" in value for rows, _ in found.values() for _, value in rows):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)

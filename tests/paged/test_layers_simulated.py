"""Models whose layers are of several kinds, simulated and planned: pages by their plan, and what windows, chunks and states read."""

import json

import msgspec
import numpy as np
import pytest

from paged import BlockManager, Request, Scheduler
from paged.errors import BudgetTooSmall
from paged.model.layer_plan import Layers, Part
from paged.model.model_shape import Mixers
from paged.study.hardware import Device, ModelShape, Roofline, StepWork, model_named, model_names
from paged.study.hardware.step_work import Span, mean_pairs, mean_read
from paged.study.simulator import Device as RunsOn, Load, Scenario
from paged.study.simulator.stretch import SteadyBatch, steady_work, work_of

from ..driving import steps_of  # noqa: TID252
from .files_of_others import TINY  # noqa: TID252

# K and V of 2 heads of 2 elements in bf16.
KV = (8, 8)
FULL = Layers(kind="full", count=1, entry=KV)
WINDOW = Layers(kind="window", count=1, entry=KV, reach=8)
STATE = Layers(kind="state", count=1, parts=(Part(units=4, unit_bytes=64),))
WINDOWED = {"kept": (FULL, WINDOW)}
HYBRID = {"kept": (FULL, STATE), "mixers": Mixers(layers=1, parameters=100)}
BOX = {"name": "box", "memory_bytes": 3_000_000, "bandwidth": 1e9, "peak_flops": {"bf16": 1e10}, "host_link": 1e8}
TRACE = "synthetic:poisson,rate=20,requests=12,prompt=24,output=6"


def roofline(layers, **placed):
    return Roofline(
        model=ModelShape(**TINY, **layers), device=Device(**BOX, interconnect=1e6), host_overhead_s=0.0, **placed
    )


@pytest.fixture
def on_box(tmp_path):
    """Writes a model and a small device. Returns the options that name them."""

    def write(layers):
        document = {**TINY, "max_length": 256, **{name: msgspec.to_builtins(value) for name, value in layers.items()}}
        (tmp_path / "model.json").write_text(json.dumps(document))
        (tmp_path / "box.json").write_text(json.dumps(BOX))
        return ["--model", tmp_path / "model.json", "--device", tmp_path / "box.json", "--published"]

    return write


@pytest.mark.parametrize(("kind", "reach"), [("full", 0), ("window", 1), ("window", 3), ("chunk", 1), ("chunk", 4)])
def test_layers_read_what_their_tokens_see(kind, reach):
    def first(token):
        return {"full": 0, "window": max(0, token - reach + 1), "chunk": token // reach * reach if reach else 0}[kind]

    spans = (Span(kind, reach, 1.0, 1.0),)
    for start in range(10):
        for end in range(start + 1, 12):
            share = np.array([start]), np.array([end])
            assert mean_read(spans, *share).tolist() == [end - first(start)]
            assert mean_pairs(spans, *share) == sum(token + 1 - first(token) for token in range(start, end))


def test_steps_that_are_taken_at_once_count_what_each_of_them_does():
    spans = (Span("full", 0, 0.75, 0.5), Span("window", 8, 0.25, 0.5))
    scheduler = Scheduler(BlockManager(64, 4))
    for number, length in enumerate([3, 7, 12]):
        scheduler.add(Request(id=str(number), prompt=np.arange(length), max_tokens=9))
    _, *decodes = steps_of(scheduler, token=0)
    together = steady_work(SteadyBatch(decodes[0].ids, decodes[0].seq_lens, 3), len(decodes), spans=spans)
    one_by_one = StepWork.of_steps([work_of(batch, 4, spans=spans) for batch in decodes])
    assert together.context_tokens.tolist() == one_by_one.context_tokens.tolist()
    assert together.longest_decode.tolist() == one_by_one.longest_decode.tolist()


def test_a_device_without_room_for_a_block_and_its_state_is_refused():
    large = Layers(kind="state", count=1, parts=(Part(units=4, unit_bytes=1_000_000),))
    with pytest.raises(BudgetTooSmall, match="do not hold one block of 16 tokens"):
        roofline({**HYBRID, "kept": (FULL, large)}).num_blocks(16)


def test_slots_are_counted_in_every_kind_of_layer(document, on_box):
    options = ["synthetic:at-once,requests=1,prompt=20,output=1", *on_box(WINDOWED)]
    # Two blocks of 16 in each of two kinds of layers, with 20 tokens each.
    (found,) = document("simulate", *options)
    assert found["memory"]["of_held"] == 2 * 20 / (2 * 2 * 16)


def test_windows_that_go_back_let_more_sequences_run_on_the_same_bytes(document, on_box):
    trace = "synthetic:at-once,requests=40,prompt=40,output=150"
    options = ["--max-sequences", 64, "--no-prefix-caching", "--max-tokens-per-step", 64]
    # A block of both layers has the bytes of two pages.
    (whole,) = document("simulate", trace, *on_box({}), *options, "--blocks", 40)
    (windowed,) = document("simulate", trace, *on_box(WINDOWED), *options, "--blocks", 80)
    assert windowed["row_occupancy"] > 1.3 * whole["row_occupancy"]


@pytest.mark.parametrize("layers", [WINDOWED, HYBRID], ids=["window", "state"])
def test_policies_that_draw_as_they_go_work_with_layers_of_several_kinds(document, on_box, layers):
    trace = "synthetic:at-once,requests=12,prompt=60,output=20"
    policies = "paged,paged-fair,vllm,sarathi,fastgen,trtllm-max-utilization,trtllm-guaranteed-no-evict"
    options = ["--policy", policies, "--max-sequences", 8, "--blocks", 32, "--check", "--jobs", 1]
    found = document("simulate", trace, *on_box(layers), *options)
    assert [(each["finished"], each["violations"]) for each in found] == [(12, 0)] * 7
    assert max(each["preemptions"]["recompute"] for each in found) > 0


@pytest.mark.parametrize("command", ["simulate", "plan --find rate --ttft 1"])
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--host-blocks 4", "a simulated host tier (host_blocks) is not possible with window layers"),
        ("--policy orca-max", "policy orca-max, which draws what a request may become, is not possible with window"),
    ],
)
def test_what_is_not_possible_with_these_layers_is_refused_by_name(refused, on_box, command, option, said):
    assert said in refused(*command.split(), TRACE, *on_box(WINDOWED), *option.split())


@pytest.mark.parametrize("name", [name for name in model_names() if model_named(name).kept])
def test_every_model_that_ships_with_layers_of_several_kinds_is_simulated(name):
    shape = model_named(name)
    scenario = Scenario(
        load=Load(trace="synthetic:poisson,rate=2,requests=3,prompt=900,output=3"), blocks=4_000,
        device=RunsOn(model=name, device="h100"), max_tokens_per_step=512,
    )  # fmt: skip
    result = scenario.simulation().result()
    assert len(result.groups) == len({(each.kind, each.reach) for each in shape.kept})
    layout = scenario.layout()
    assert layout.full_pages > 0 or name == "mistral-7b"

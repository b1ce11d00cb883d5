"""What the tests of models share: tiny checkpoints with random weights, and worlds in which their memory is short.

Torch runs on one thread, since matrices this small are not worth two; transformers says nothing.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paged import Policy, Request, Retention

if find_spec("torch") is None or find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from paged import Engine
    from paged.model.loading import LoadedModel, config_of, load_model, reference_attention, silenced
    from paged.testing.engine_world import EngineRequest, EngineWorld
    from paged.testing.pressure import Answers, answers_in_turn, answers_of, differences

VOCABULARY, FIRST_WORD = 97, 3
# What of each architecture is other than by default; the last three are refused. Windows of 7 are smaller than most prompts and no multiple of
# a block, caps are far from what would do nothing, and embeddings as large as Gemma's are untied: text of random ones repeats its last word.
_SPECIAL = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_FOUND = json.loads(Path(__file__).with_name("tiny_configs.json").read_text())
CONFIGS: dict[str, dict[str, Any]] = {name: {**_SPECIAL, **fields} for name, fields in _FOUND.items()}


@pytest.fixture(scope="module", autouse=True)
def _quiet_and_on_one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with silenced():
        yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def on_any_threads() -> Callable[[Callable[[], list[torch.Tensor]]], bool]:
    """on_any_threads(call): whether tensors are the same bits on one, two and three threads."""

    def are_the_same(call: Callable[[], list[torch.Tensor]]) -> bool:
        before, found = torch.get_num_threads(), []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(call())
        torch.set_num_threads(before)
        return all(map(torch.equal, found[1], found[0])) and all(map(torch.equal, found[2], found[0]))

    return are_the_same


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """saved(config, spread, seed=0): a folder with a model of random weights, large enough that greedy text wanders."""

    def save(config: Any, spread: float, seed: int = 0) -> Path:
        folder = tmp_path_factory.mktemp(config.model_type)
        with torch.random.fork_rng(), silenced(), torch.no_grad():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config).float()
            for path, weights in model.named_parameters():
                if weights.dim() >= 2:
                    weights.normal_(0, spread)
                elif path.endswith(".sinks"):
                    weights.normal_(0, 2)
            model.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def checkpoint(saved: Callable[..., Path]) -> Callable[..., Path]:
    """checkpoint(architecture, **changes): such a folder, `changes` being made to its configuration. It is shared: copy it before you
    harm it."""
    made: dict[str, Path] = {}

    def make(architecture: str, **changes: Any) -> Path:
        name = "-".join([architecture, *(f"{key}={value}" for key, value in sorted(changes.items()))])
        if name not in made:
            made[name] = saved(AutoConfig.for_model(architecture, **{**CONFIGS[architecture], **changes}), 0.3)
        return made[name]

    return make


@pytest.fixture(scope="session")
def loaded(checkpoint: Callable[..., Path]) -> Callable[..., LoadedModel]:
    """loaded(architecture, **changes): that checkpoint as a LoadedModel, loaded once."""
    found: dict[Path, LoadedModel] = {}

    def load(architecture: str, **changes: Any) -> LoadedModel:
        folder = checkpoint(architecture, **changes)
        if folder not in found:
            found[folder] = load_model(folder)
        return found[folder]

    return load


@pytest.fixture(scope="session")
def generate() -> Callable[..., list[list[int]]]:
    """generate(folder, prompts, most): what transformers writes after each prompt, greedily, so many tokens."""

    def texts(folder: Path, prompts: list[list[int]], most: list[int]) -> list[list[int]]:
        # Under some versions Gemma 2 chooses another attention by itself, which knows no soft cap.
        attention = reference_attention(config_of(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
        model.generation_config.eos_token_id = None
        greedy, found = {"do_sample": False}, []
        for prompt, max_tokens in zip(prompts, most, strict=True):
            ids, seen = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.int64)
            written = model.generate(ids, attention_mask=seen, max_new_tokens=max_tokens, **greedy)
            found.append(written[0, len(prompt) :].tolist())
        return found

    return texts


def poisoned(engine: Engine) -> Engine:
    """The same engine. Before each step its free pages become NaN, unless an earlier step still runs."""
    step = engine.step

    def poison_and_step() -> list[Any]:
        if not engine._steps.num_outstanding:
            engine.pool.poison(torch.from_numpy((engine.manager.device.states == 0).nonzero()[0]))
        return step()

    engine.step = poison_and_step
    return engine


@dataclass(frozen=True)
class ShortMemory:
    """Requests whose prompts begin alike, each alone, and together in blocks that hold the longest of them and all states. What is free is NaN."""

    max_tokens: int
    lengths: tuple[int, ...] = (5, 6, 25)
    block_size: int = 8

    def requests(self) -> list[EngineRequest]:
        words = np.random.default_rng(1).integers(FIRST_WORD, VOCABULARY, max(self.lengths)).tolist()
        return [
            EngineRequest(id=str(length), prompt=[*words[: length - 1], length], max_tokens=self.max_tokens)
            for length in self.lengths
        ]

    def engine(self, model: LoadedModel, **options: Any) -> Engine:
        return poisoned(Engine(model, **{"num_blocks": 500, "block_size": self.block_size, **options}))

    def alone(self, model: LoadedModel, **options: Any) -> Answers:
        engine = self.engine(model, prefix_caching=False, max_tokens_per_step=64, **options)
        return self._end_logits(answers_in_turn(engine, self.requests()))

    def _end_logits(self, answers: Answers) -> Answers:
        """A step ahead, logits behind the last token are shown, too; without them."""
        for who, tokens in answers.tokens.items():
            del answers.logits[who][len(tokens) :]
        return answers

    def check(self, model: LoadedModel, *, preempts: bool = True, **options: Any) -> Answers:
        """Fail unless those are the answers when memory is short, in chunks and swapped, to the bit; the answers. If it `preempts`, some request
        has to give way."""
        answers, preempted = self.alone(model, **options), 0
        layout = self.engine(model, **options).manager.layout
        pages = layout.pages_for(max(self.lengths) + self.max_tokens) + 3 * layout.state_pages
        swaps = Policy(name="swaps", take="tail", preemption="swap")
        for more in ({"max_tokens_per_step": 7}, {"host_blocks": 500, "policy": swaps, "max_tokens_per_step": 64}):
            engine = self.engine(model, num_blocks=pages, **options, **more)
            found = answers_of(engine, self.requests())
            self._end_logits(found)
            assert differences(found, answers) + found.violations == [], more
            assert (engine.manager.device.num_used, engine.manager.host.num_used) == (0, 0)
            stats = engine.scheduler.stats()
            preempted += stats.preemptions_recompute + stats.preemptions_swap
        assert preempted > 0 or not preempts
        return answers


@pytest.fixture(scope="session")
def short_memory() -> type[ShortMemory]:
    return ShortMemory


@dataclass(frozen=True)
class World:
    """Requests, and conditions under which there is not room for all of them."""

    conditions: EngineWorld
    requests: tuple[Request, ...]


def _draw_world(chance: random.Random) -> World:
    """Requests that share prefixes, most of them cut near a block's end, and grow into each other's memory."""
    block_size = chance.choice([1, 2, 3, 4, 4, 5, 8, 8, 16, 32, 64, chance.randint(1, 64)])
    most_blocks = 6 if block_size <= 4 else 3 if block_size <= 16 else 1
    texts = [[chance.randrange(FIRST_WORD, VOCABULARY) for _ in range(80)] for _ in range(2)]
    requests: list[Request] = []
    for number in range(chance.randint(4, 6)):
        length = block_size * chance.randint(1, most_blocks) + chance.choice([-1, -1, 0, 0, 1, 2, -(block_size // 2)])
        tail = [chance.randrange(FIRST_WORD, VOCABULARY) for _ in range(chance.choice([0, 0, 1, 2]))]
        shared = chance.choice(texts)[: max(1, length - len(tail))]
        if number > 3 and chance.random() < 0.8:
            # One that was here before comes back, when others have pushed out what it left.
            shared, tail = list(requests[number - 4].prompt), tail[:1]
        wishes: dict[str, Any] = {
            "max_tokens": chance.choice([2, 6, 10, 14]),
            "priority": chance.choice([0, 0, 0, 1]),
            "reads_cache": chance.random() < 0.9,
            "writes_cache": chance.random() < 0.9,
        }
        kept = Retention(priority=chance.randint(1, 3), lasts=chance.choice([None, 5.0]))
        wishes["retention"] = chance.choice([None, None, kept])
        requests.append(Request(id=str(number), prompt=shared + tail, **wishes))
    largest = max(-(-(len(request.prompt) + request.max_tokens) // block_size) for request in requests)
    conditions = EngineWorld(
        num_blocks=largest + chance.choice([0, 0, 1]),
        block_size=block_size,
        host_blocks=chance.choice([0, 2, 2 * largest, 4 * largest]),
        host_caching=chance.random() < 0.7,
        policy=chance.choice(["paged", "paged", "paged", "vllm", "fastgen"]),
        max_tokens_per_step=chance.choice([7, 16, 40, 100]),
        max_sequences=chance.choice([3, 6, 8]),
        max_chunk=chance.choice([None, 64, chance.randint(1, 64)]),
        backend=chance.choice(["reference", "torch_gather", "native"]),
    )
    return World(conditions, tuple(requests))


@pytest.fixture(scope="session")
def draw_world() -> Callable[[random.Random], World]:
    """Draws a World from a source of chance, seeded or Hypothesis's."""
    return _draw_world

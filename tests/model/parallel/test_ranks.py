"""A model on two processes: the same tokens as on one, the same bits under pressure, and an error as soon as a rank is gone."""

import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import paged.model.parallel.ranks
from paged import Engine, EngineConfig, SamplingParams
from paged.errors import InvalidConfig, PagedWarning, RanksDiffer, RanksFailed, UnevenSplit
from paged.model.loading import config_of
from paged.model.parallel.messages import Join, Run
from paged.model.parallel.ranks import Ranks, load_split
from paged.model.parallel.split import check_split
from paged.model.threads import usable_cores
from paged.testing.engine_world import EngineRequest
from paged.testing.pressure import answers_of, differences

from ...shown import assert_refused, shown_in  # noqa: TID252

pytestmark = pytest.mark.skipif(usable_cores() < 2, reason="two ranks want two cores")
ROOMY = {"num_blocks": 200, "block_size": 4, "prefix_caching": False, "max_tokens_per_step": 256}
SHORT = {"num_blocks": 24, "block_size": 4, "host_blocks": 16, "max_tokens_per_step": 16, "max_sequences": 6}
# Greedy text may part where the two best logits are nearer than this share of the largest one.
NEAR = 1e-4


def requests():
    """Prompts of which some begin alike."""
    words = np.random.default_rng(1).integers(3, 97, (4, 30)).tolist()
    prompts = {
        **{f"alike {length}": [*words[0][:length], length] for length in (9, 17, 20, 24)},
        **{f"other {number}": words[number][: 8 * number] for number in (1, 2, 3)},
    }
    return [EngineRequest(id=id, prompt=prompt, max_tokens=24) for id, prompt in prompts.items()]


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("llama")


@pytest.fixture(scope="module")
def roomy(folder):
    engine = Engine(folder, tensor_parallel_size=2, **ROOMY)
    yield engine
    (rank,) = engine.worker.ranks.process_ids
    engine.close()
    wait_until_gone(rank)


def test_greedy_tokens_are_those_of_one_process_but_where_two_words_are_as_likely(folder, roomy):
    ours, whole = answers_of(roomy, requests()), answers_of(Engine(folder, **ROOMY), requests())
    assert sum(has_parted(ours, whole, who) for who in whole.tokens) <= 1


def has_parted(ours, whole, who):
    """Whether texts are different ones from a token on; logits are near up to it, and there two words are as likely."""
    columns = ours.tokens[who], whole.tokens[who], ours.logits[who], whole.logits[who]
    for own, theirs, our_row, row in zip(*columns, strict=True):
        second, best = np.sort(row)[-2:]
        assert is_near(our_row, row)
        if own != theirs:
            assert best - second <= NEAR * np.abs(row).max()
            return True
    return False


def is_near(found, row):
    return np.abs(found - row).max() <= NEAR * np.abs(row).max()


def test_under_pressure_and_with_drafts_a_split_model_gives_the_same_bits_and_forgotten_it_leaves_no_process(
    folder, roomy
):
    pressed = Engine(folder, tensor_parallel_size=2, speculate="lookahead", **SHORT)
    found = answers_of(pressed, requests())
    assert differences(found, answers_of(roomy, requests())) + found.violations == []
    stats = pressed.scheduler.stats()
    assert stats.preemptions_swap and stats.hit_tokens and stats.drafted_tokens
    (rank,) = pressed.worker.ranks.process_ids
    del pressed
    gc.collect()
    wait_until_gone(rank)


def test_layers_of_several_kinds_are_split_too_steps_may_be_taken_ahead_and_a_rank_that_hangs_is_ended_in_time(
    checkpoint, monkeypatch
):
    monkeypatch.setattr(paged.model.parallel.ranks, "LIMIT_S", 10.0)
    folder, asked = checkpoint("gemma3_text"), {**SHORT, "num_blocks": 60, "host_blocks": 0}
    split = Engine(folder, tensor_parallel_size=2, steps_ahead=1, **asked)
    found, whole = answers_of(split, requests()), answers_of(Engine(folder, **asked), requests())
    assert not split.pool.is_side_by_side
    assert found.tokens == whole.tokens
    # A step ahead, there are some behind the last token, too.
    assert all(all(map(is_near, found.logits[who], rows)) for who, rows in whole.logits.items())
    (rank,) = split.worker.ranks.process_ids
    os.kill(rank, signal.SIGSTOP)
    with pytest.raises(RanksFailed, match="cannot go on"):
        completion_of(split, [5, 6, 7], SamplingParams(max_tokens=4))
    wait_until_gone(rank)


def completion_of(engine, prompt, params):
    engine.on_logits = None
    engine.add_request(prompt, params, id="a")
    live = engine.live_request("a")
    while engine.has_unfinished:
        engine.step()
    return live.completion()


def test_a_rank_that_is_killed_ends_the_engine_at_once_and_every_step_says_so(folder):
    engine = Engine(folder, tensor_parallel_size=2, **ROOMY)
    (rank,) = engine.worker.ranks.process_ids
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True))
    engine.step()
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(
        RanksFailed, match=r"split over 2 ranks cannot go on: the process of rank 1 ended with status -9"
    ):
        engine.step()
    assert engine.has_unfinished
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=1), id="after it")
    with pytest.raises(RanksFailed, match="ended with status -9. Make a new engine"):
        engine.step()
    # Both have ended with an error, and nothing is held.
    assert engine.check() == []
    ended = {each.id: each for each in engine.outputs_of(["request-0", "after it"])}
    assert [each.finish_reason for each in ended.values()] == ["error", "error"]
    assert all(each.error.startswith("RanksFailed: ") for each in ended.values())
    assert not engine.has_unfinished


@pytest.mark.usefixtures("handled_by_python")
def test_an_interrupt_behind_a_message_leaves_all_ranks_at_the_same_step(roomy, monkeypatch):
    asked, prompt, messages, interrupts = SamplingParams(max_tokens=6, ignore_eos=True), [5, 6, 7, 8], [], 0
    want = completion_of(roomy, prompt, asked).token_ids
    send = Ranks.send

    def interrupted(self, message):
        send(self, message)
        messages.append(message)
        if isinstance(message, Run) and len(messages) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Ranks, "send", interrupted)
    roomy.add_request(prompt, asked, id="a")
    live = roomy.live_request("a")
    while roomy.has_unfinished:
        try:
            roomy.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    assert live.completion().token_ids == want


def test_a_runtime_error_of_rank_0_and_of_another_rank_is_a_failure_of_the_ranks(folder):
    # As when rank 0 is late: what waited for it and what it does next both end in a RuntimeError of torch's.
    ranks = Ranks(2)
    ranks.send(Join(0, str(folder), "auto", "no such device"))
    wait_until_gone(*ranks.process_ids)
    with pytest.raises(RanksFailed, match="cannot go on: rank 1: RuntimeError: "), ranks.guarded():
        raise RuntimeError("the connection is closed")


@pytest.mark.usefixtures("handled_by_python")
def test_an_interrupt_of_a_load_is_not_held_back_and_ends_all_ranks(folder, monkeypatch):
    processes, held_back = [], []

    def answers_late(self, *_):
        processes.extend(self.process_ids)
        signal.raise_signal(signal.SIGINT)
        held_back.append(True)
        raise TimeoutError

    monkeypatch.setattr(Ranks, "_answers", answers_late)
    with pytest.raises(KeyboardInterrupt):
        load_split(folder, 2, dtype="auto", device="cpu")
    assert not held_back
    wait_until_gone(*processes)


def test_an_engine_that_cannot_be_made_leaves_no_process_while_its_error_is_kept(folder, monkeypatch):
    processes, join = [], Ranks._join
    monkeypatch.setattr(Ranks, "_join", lambda self, digest: processes.extend(self.process_ids) or join(self, digest))
    with pytest.raises(InvalidConfig, match="for each rank") as kept:
        Engine(folder, tensor_parallel_size=2, num_blocks=10**9)
    (rank,) = processes
    wait_until_gone(rank)
    assert kept.value


def test_ranks_load_no_scheduler_and_end_with_a_process_that_is_killed():
    code = (
        "import sys, time, paged.model.parallel.rank\n"
        "print(*(each for each in sys.modules if each.startswith('paged') and 'scheduler' in each))\n"
        "from paged.model.parallel.ranks import Ranks\n"
        "ranks = Ranks(2)\n"
        "print(*ranks.process_ids, flush=True); time.sleep(600)"
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=variables) as parent:
        assert parent.stdout is not None
        loaded, rank = parent.stdout.readline().split(), int(parent.stdout.readline())
        parent.kill()
    assert loaded == []
    wait_until_gone(rank)


DIFFERS = {
    "versions": (lambda: {"paged": "0.0.1"}, "rank 1 has other versions: .* rank 0 has"),
    # What rank 0 reads differs from what rank 1 says that it has.
    "Ranks._join": (
        lambda self, digest, join=Ranks._join: join(self, digest + "0"),
        "rank 1 read other weights: digest",
    ),
}


@pytest.mark.parametrize("name", DIFFERS)
def test_a_rank_that_differs_is_named_and_more_ranks_than_cores_are_said(folder, monkeypatch, name):
    other, what = DIFFERS[name]
    monkeypatch.setattr("paged.model.parallel.ranks.usable_cores", lambda: 1)
    monkeypatch.setattr(f"paged.model.parallel.ranks.{name}", other)
    said = pytest.warns(PagedWarning, match="tensor_parallel_size=2 on 1 core")
    with pytest.raises(RanksDiffer, match=what), said:
        load_split(folder, 2, dtype="auto", device="cpu")


@pytest.mark.parametrize(("call", "shown"), shown_in("model/parallel/refused_splits.txt", ">>>"))
def test_what_cannot_be_split_is_refused_before_any_rank_is_started(checkpoint, loaded, monkeypatch, call, shown):
    monkeypatch.setattr(Ranks, "__init__", lambda *_: pytest.fail("ranks were started"))

    def checked(architecture, degree=2, **stored):
        config = config_of(checkpoint(architecture))
        config.quantization_config = stored or None
        check_split(config, degree, "folder")

    with suppress(PagedWarning):
        names = {"Engine": Engine, "asked": partial(EngineConfig.of, "no folder", tensor_parallel_size=2)}
        error = assert_refused(call, shown, {**names, "checked": checked, "checkpoint": checkpoint, "loaded": loaded})
    if isinstance(error, UnevenSplit):
        assert (error.degree, error.heads, error.kv_heads, error.degrees) == (3, 4, 2, [2, 4])


def wait_until_gone(process):
    for _ in range(600):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"process {process} lives")

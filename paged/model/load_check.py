"""A check before a checkpoint's weights are read: a small random model of its configuration answers here as in transformers.

The small model has every kind of layer of the large one, in float32 on the CPU (`shrinking.py`). It runs twice: through the runner, on blocks, with
rows of several lengths in a batch and prompts in chunks; and by transformers' forward pass and attention, one sequence at a time. Lengths lie on
both sides of each limit in the configuration. A pass is recorded as a file in the folder of compiled code, under a digest of the configuration,
our code, the versions of torch and transformers, and the processor.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paged.attention.native.build import cache_folder, processor
from paged.base.words import short_cause
from paged.errors import BuildFailed, UnsupportedModel
from paged.model.capacity import trial_memory, trial_step
from paged.model.loading import LoadedModel, as_loaded, attention_of, reference_attention, refusing
from paged.model.runner import Runner, runner_for
from paged.model.shrinking import LONGEST, Shrunk
from paged.model.threads import THREADS

# Largest difference of logits, as a share of the largest logit. Rounding gives less than a hundredth of it, another window or layer a hundred times it.
BOUND = 1e-3
# Most parameters of a model that is made for the check.
_MOST_PARAMETERS = 50_000_000
# Tokens of a row in a step, in rotation.
_CHUNKS = (5, 1, 8, 3)
_SCALE = 0.15
# Tokens that transformers generates across a limit.
_DECODED = 6
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
_PASSED: set[str] = set()
_quiet = partial(warnings.catch_warnings, action="ignore")


def check_answers(config: Any, name: Path) -> None:
    """Raise UnsupportedModel, with the first layer that differs, unless a small random model of this configuration answers as in transformers."""
    key = _key(config)
    with suppress(OSError, BuildFailed):
        if key in _PASSED or (cache_folder() / key).is_file():
            return
    # A second thread makes matrices this small wait.
    with THREADS.at_most(1):
        _compare(config, name)
    _PASSED.add(key)
    with suppress(OSError, BuildFailed):
        cache_folder().mkdir(parents=True, exist_ok=True)
        (cache_folder() / key).touch()


def _key(config: Any) -> str:
    values = {name: value for name, value in config.to_dict().items() if name not in _VOLATILE}
    settings = json.dumps(values, sort_keys=True, default=str)
    return f"checked-{hashlib.sha256(f'{settings}{_code()}'.encode()).hexdigest()[:20]}"


@cache
def _code() -> str:
    """Return a digest of everything else that an answer depends on: versions, processor and our code."""
    import transformers

    import paged.attention

    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__} {processor()}".encode())
    for folder in (Path(__file__).parent, Path(paged.attention.__file__).parent):
        for file in sorted(folder.rglob("*.[pch]*")):
            if file.suffix in (".py", ".c", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


class _Expected(NamedTuple):
    """A small configuration; a model of it with transformers' attention, and one with ours; rows of token ids; and transformers' results for each row:
    the logits, and the output of every layer."""

    small: Shrunk
    theirs: Any
    ours: Any
    rows: list[NDArray[np.int64]]
    logits: list[Tensor]
    layers: list[list[Tensor]]


def _compare(config: Any, name: Path) -> None:
    small, theirs, ours, rows, expected, of_layers = _expected(config, name)
    model = as_loaded(ours, name, None, torch.device("cpu"))
    layers = _Layers(model.module, len(small.layers))
    with torch.inference_mode(), refusing(model.module, name):
        found, places = _paged(model, rows)
    worst = max(map(difference, found, expected))
    if worst <= BOUND:
        _check_generate(theirs, rows, [each for each in small.lengths if each != model.rotary_limit], name)
        return
    first = None
    for layer, output in enumerate(layers.taken()):
        its = [each[layer] for each in of_layers]
        if first is None and max(map(difference, [output[place] for place in places], its)) > BOUND:
            first = layer
    where = "what follows its layers" if first is None else f"layer {small.layers[first]} ({layers.kinds[first]})"
    raise UnsupportedModel(
        f"{name}: a small random model of its configuration answers otherwise than in transformers: logits differ by {worst:.1e} of "
        f"the largest; {BOUND:.0e} is allowed. The first to differ is {where}."
    )


def _expected(config: Any, name: Path) -> _Expected:
    """Return transformers' results with a narrow model, or, if it cannot run that, with one as wide as the checkpoint. Raises UnsupportedModel if
    neither runs."""
    cause: Exception | None = None
    for is_narrow in (True, False):
        try:
            small = Shrunk(config, is_narrow=is_narrow)
            theirs, ours = _of_same_weights(small)
            text = small.config.get_text_config()
            rows = _rows(small.lengths, getattr(text, "max_position_embeddings", None) or LONGEST, text.vocab_size)
            layers = _Layers(theirs, len(small.layers))
            logits, of_layers = [], []
            with torch.inference_mode(), _quiet():
                for row in rows:
                    logits.append(theirs(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0])
                    of_layers.append(layers.taken())
            if not torch.cat(logits).isfinite().all():
                raise ArithmeticError("its logits are not finite")
            return _Expected(small, theirs, ours, rows, logits, of_layers)
        except Exception as error:
            cause = cause or error
    assert cause is not None, "a model is returned"
    raise UnsupportedModel(
        f"{name}: no small random model of its configuration runs in transformers, so that its answers cannot be checked: "
        f"{short_cause(cause)}"
    ) from cause


def generated(module: Any, prompt: Tensor, num_tokens: int) -> Any:
    """Return transformers' greedy output for a prompt, int64 [1, n]: `sequences`, prompt included, and `logits` of each new token."""
    return module.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def _check_generate(theirs: Any, rows: list[NDArray[np.int64]], limits: list[int], name: Path) -> None:
    """Raise UnsupportedModel if transformers answers otherwise with its cache than without: some caches drop tokens that the masks let a token see, and
    some models forget their cache at a limit."""
    theirs.generation_config.eos_token_id = None
    for length in {*(max(1, limit - 2) for limit in limits), max(1, len(rows[-1]) - _DECODED)}:
        prompt = torch.from_numpy(rows[-1][:length])[None]
        most = min(_DECODED, len(rows[-1]) - length)
        if most < 1:
            continue
        with torch.inference_mode(), _quiet():
            try:
                out = generated(theirs, prompt, most)
            except Exception as error:
                raise UnsupportedModel(
                    f"{name}: a small random model of its configuration does not generate in transformers: {short_cause(error)}"
                ) from error
            expected = theirs(input_ids=out.sequences[:, :-1], use_cache=False).logits[0, length - 1 :]
        apart = difference(torch.cat(out.logits), expected)
        if apart > BOUND:
            raise UnsupportedModel(
                f"{name}: a small random model of its configuration answers otherwise in transformers with a cache than without (logits differ "
                f"by {apart:.1e} of the largest, {most} tokens behind {length}), so that no answer is the right one. A window that its layers' "
                "masks do not have is a cause; without sliding_window in the configuration it may do."
            )


def _of_same_weights(small: Shrunk) -> tuple[Any, Any]:
    """Return a model with transformers' attention, and one with ours and the same weights."""
    with torch.device("meta"):
        counted = sum(each.numel() for each in _built(small.config, "eager").parameters())
    if counted > _MOST_PARAMETERS:
        raise MemoryError(f"with its own widths {len(small.layers)} layers have {counted:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attention = reference_attention(small.config), attention_of(small.config)
        theirs, ours = _built(small.config, attention[0]), _built(small.config, attention[1])
        for weights in theirs.parameters():
            if weights.dim() >= 2:
                weights.data.normal_(0, _SCALE)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def _built(config: Any, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    return build(copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32).eval()


def _rows(limits: list[int], longest: int, vocabulary: int) -> list[NDArray[np.int64]]:
    """Return token ids of rows of one token, of lengths on both sides of every limit, and of LONGEST tokens; of none longer than `longest`."""
    lengths = {1, *(limit + more for limit in limits for more in (0, 1, 4)), LONGEST}
    drawn = np.random.default_rng(0)
    return [drawn.integers(0, vocabulary, length) for length in sorted(lengths) if length <= longest]


def _paged(model: LoadedModel, rows: list[NDArray[np.int64]]) -> tuple[list[Tensor], list[NDArray[np.int64]]]:
    """Return the logits of each row after every token, and the places of these tokens in the order of computation."""
    pool, tables = trial_memory(model, len(rows), max(map(len, rows)))
    runner = runner_for(model, pool, batch_invariant=False)
    lengths = np.array(list(map(len, rows)))
    done = np.zeros(len(rows), np.int64)
    logits: list[Tensor] = []
    places: list[list[int]] = [[] for _ in rows]
    for nth in range(LONGEST):
        chunks = np.array([_CHUNKS[(nth + row) % len(_CHUNKS)] for row in range(len(rows))])
        counts = np.minimum(chunks, lengths - done)
        going = counts.nonzero()[0]
        if not len(going):
            break
        with _quiet():
            logits.append(_step(runner, rows, tables, done, counts, going, lengths[going]))
        number = sum(map(len, logits[:-1]))
        for row in going:
            places[row] += range(number, number + counts[row])
            number += counts[row]
        done += counts
    together = torch.cat(logits)
    at = [np.array(each) for each in places]
    return [together[each] for each in at], at


def _step(
    runner: Runner,
    rows: list[NDArray[np.int64]],
    tables: tuple[NDArray[np.int32], ...],
    done: NDArray[np.int64],
    counts: NDArray[np.int64],
    going: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> Tensor:
    """Run a step with the next `counts` tokens of each row of `going`. Return the logits after each token."""
    positions = [np.arange(done[row], done[row] + counts[row]) for row in going]
    step = trial_step(
        runner.pool,
        np.concatenate(positions),
        np.concatenate([[0], counts[going].cumsum()]),
        done[going] + counts[going],
        tuple(each[going] for each in tables),
    )
    token_ids = np.concatenate([rows[row][its] for row, its in zip(going, positions, strict=True)]).astype(np.int32)
    return runner.forward(step, token_ids, np.ones(len(token_ids), np.bool_), lengths)


class _Layers:
    """Records the output of each layer of a model."""

    def __init__(self, module: nn.Module, count: int) -> None:
        lists = (each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each) == count)
        layers = list(next(lists, ()))
        self.kinds = [type(each).__name__ for each in layers]
        self._outputs: list[list[Tensor]] = [[] for _ in layers]
        for outputs, layer in zip(self._outputs, layers, strict=True):
            layer.register_forward_hook(partial(_note, outputs))

    def taken(self) -> list[Tensor]:
        """Return the recorded outputs, [tokens, hidden size] a layer, in the order of computation, and forget them. Layers that were not called, such
        as those in C, are left out."""
        found = [torch.cat(outputs) for outputs in self._outputs if outputs]
        for outputs in self._outputs:
            outputs.clear()
        return found


def _note(outputs: list[Tensor], module: Any, given: Any, output: Any) -> None:
    outputs.append((output[0] if isinstance(output, tuple) else output)[0].clone())


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, as a share of the largest number of `theirs`."""
    return float((ours - theirs).abs().max() / theirs.abs().max())

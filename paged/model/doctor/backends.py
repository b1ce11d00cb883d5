"""The attention backends that work on each device, tried with the model that ships."""

from __future__ import annotations

import time
import warnings
from contextlib import suppress
from pathlib import Path
from shutil import which

import torch

from paged import LLM, SamplingParams
from paged.attention import LayerShape, best_backend, get_backend, known_backends, triton_blocks, xformers_splitk
from paged.errors import BuildFailed, PagedWarning, UnsupportedByBackend
from paged.model.doctor.findings import REPORT, BackendFound, CudaDevice, Problem, cause
from paged.model.loading import LoadedModel

_PROMPT, _TOKENS, _BLOCKS = "The with statement is used to", 16, 8
_DRIVER = Path("/proc/driver/nvidia/version")
_NOT_TRIED = "it is compiled at first use"


def cuda_devices() -> tuple[list[CudaDevice], list[Problem]]:
    """Return the CUDA devices that torch finds; and a problem if there is a driver, and torch finds none."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = []
    for number in range(count):
        about = torch.cuda.get_device_properties(number)
        capability = f"{about.major}.{about.minor}"
        found.append(CudaDevice(name=about.name, total_bytes=about.total_memory, capability=capability))
    if found or not (_DRIVER.exists() or which("nvidia-smi")):
        return found, []
    if torch.version.cuda is None:
        what = f"Here is a driver of NVIDIA's, and torch {torch.__version__} is built without CUDA."
        return [], [Problem(what=what, remedy="pytorch.org says how to install one with CUDA.", is_broken=False)]
    why = f" ({' '.join(str(caught[0].message).split())})" if caught else ""
    what = f"Here is a driver of NVIDIA's, and torch {torch.__version__} finds no device{why}."
    remedy = (
        "See that nvidia-smi lists one, that CUDA_VISIBLE_DEVICES does not hide it, and that the driver is new enough."
    )
    return [], [Problem(what=what, remedy=remedy, is_broken=True)]


def backends(device: str, *, native_is_built: bool) -> tuple[list[BackendFound], list[Problem]]:
    """Try each backend on this type of device, with layers as most models have them. Return what was found, and a problem for each that fails where it
    should refuse."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shape = LayerShape(
        num_heads=8, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype, device=torch.device(device)
    )
    found, problems, chosen = [], [], "native"
    if native_is_built:
        with warnings.catch_warnings(action="ignore", category=PagedWarning), suppress(Exception):
            chosen = best_backend([shape]).name
    for name in known_backends():
        if name == "native" and not native_is_built:
            works, reason = None, _NOT_TRIED
        else:
            try:
                reason = _reason(name, shape)
            except Exception as error:
                reason = f"it fails: {cause(error)}"
                what = f'The backend "{name}" fails on {device}: {cause(error)}.'
                problems.append(Problem(what=what, remedy=REPORT, is_broken=True))
            works = not reason
        is_chosen = name == chosen and works is not False
        found.append(BackendFound(name=name, device=device, works=works, is_chosen=is_chosen, reason=reason))
    return found, problems


def _reason(name: str, shape: LayerShape) -> str:
    """Return why this backend cannot do such layers here; "" if it can."""
    try:
        for each in (triton_blocks, xformers_splitk):
            if name == each.Backend.name:
                # It refuses this device even if xformers, or Triton, is not installed.
                each.Backend.check(shape)
        get_backend(name).check(shape)
    except UnsupportedByBackend as error:
        if isinstance(error.__cause__, BuildFailed):
            return "it cannot be compiled here"
        _, what, instead = error.args
        # Without the list of other backends, which the examination shows anyway.
        return f"cannot do {what}; {instead.partition('; the backends')[0].rstrip('.')}"
    return ""


def answer(model: LoadedModel | None, backend: BackendFound) -> tuple[list[int], float]:
    """Return the tokens of the model's answer with this backend, and the seconds that they took. `model` None: the model that ships, loaded on the
    backend's device. Raises whatever goes wrong."""
    llm = LLM(model, backend=backend.name, device=backend.device, batch_invariant=False, num_blocks=_BLOCKS)
    began = time.perf_counter()
    (completion,) = llm.generate([_PROMPT], SamplingParams(max_tokens=_TOKENS, ignore_eos=True), use_tqdm=False)
    if completion.error is not None:
        raise RuntimeError(completion.error)
    return completion.token_ids, time.perf_counter() - began

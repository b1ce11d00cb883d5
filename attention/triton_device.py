"""The devices on which backends in Triton run. Imports no Triton."""

from __future__ import annotations

import os

import torch

from paged.errors import UnsupportedByBackend

_LEAST_CAPABILITY = (8, 0)


def check_device(name: str, device: torch.device, others: str) -> None:
    """Raise UnsupportedByBackend if this backend cannot run on the device; `others` says which ones can."""
    is_cpu, is_rocm = device.type == "cpu", torch.version.hip is not None
    is_interpreted = is_cpu and os.environ.get("TRITON_INTERPRET") == "1"
    if is_rocm or not (device.type == "cuda" or is_interpreted):
        takes = "it takes CUDA devices, and a CPU with Triton's interpreter (TRITON_INTERPRET=1)"
        can = 'the backends "native", "torch_gather" and "reference" can.' if is_cpu else others
        raise UnsupportedByBackend(name, f"device {device}{' of ROCm' if is_rocm else ''}", f"{takes}; {can}")
    if device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < _LEAST_CAPABILITY:
            least, its = (".".join(map(str, each)) for each in (_LEAST_CAPABILITY, capability))
            raise UnsupportedByBackend(name, f"compute capability {its}", f"it takes {least} and above; {others}")

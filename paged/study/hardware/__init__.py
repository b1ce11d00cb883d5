"""Models and devices as data, and what follows from their published figures: memory, and seconds of a step."""

from paged.model.model_shape import Experts, Latent, ModelShape
from paged.model.tiling import Tiling
from paged.study.hardware.capacity import Capacity, Intensity, capacity_of
from paged.study.hardware.catalogue import (
    Kept,
    device_named,
    device_names,
    is_path,
    layers_named,
    model_named,
    model_names,
    published_layers,
)
from paged.study.hardware.device import DTYPES, KV_DTYPES, Device
from paged.study.hardware.placement import kept_as, usual_dtype
from paged.study.hardware.profile import Profile, ProfiledModel
from paged.study.hardware.roofline import Faster, Roofline
from paged.study.hardware.step_work import CostModel, Spans, StepWork, budgets, suiting_budget

__all__ = [
    "DTYPES",
    "KV_DTYPES",
    "Capacity",
    "CostModel",
    "Device",
    "Experts",
    "Faster",
    "Intensity",
    "Kept",
    "Latent",
    "ModelShape",
    "Profile",
    "ProfiledModel",
    "Roofline",
    "Spans",
    "StepWork",
    "Tiling",
    "budgets",
    "capacity_of",
    "device_named",
    "device_names",
    "is_path",
    "kept_as",
    "layers_named",
    "model_named",
    "model_names",
    "published_layers",
    "suiting_budget",
    "usual_dtype",
]

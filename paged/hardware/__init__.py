"""Models and devices as data, and what follows from their published figures: memory, and seconds of a step."""

from paged.hardware.capacity import Capacity, Intensity, capacity_of
from paged.hardware.catalogue import device_named, device_names, is_path, model_named, model_names
from paged.hardware.cost_model import CostModel
from paged.hardware.device import DTYPES, Device
from paged.hardware.faster import Faster
from paged.hardware.model_shape import Experts, Latent, ModelShape
from paged.hardware.placement import Placement, usual_dtype
from paged.hardware.profile import Profile, ProfiledModel, ProfileError
from paged.hardware.roofline import Part, Roofline
from paged.hardware.step_work import Amount, StepWork, Tiling
from paged.hardware.token_budget import budgets, suiting_budget

__all__ = [
    "DTYPES",
    "Amount",
    "Capacity",
    "CostModel",
    "Device",
    "Experts",
    "Faster",
    "Intensity",
    "Latent",
    "ModelShape",
    "Part",
    "Placement",
    "Profile",
    "ProfileError",
    "ProfiledModel",
    "Roofline",
    "StepWork",
    "Tiling",
    "budgets",
    "capacity_of",
    "device_named",
    "device_names",
    "is_path",
    "model_named",
    "model_names",
    "suiting_budget",
    "usual_dtype",
]

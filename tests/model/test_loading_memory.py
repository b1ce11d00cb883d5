"""Layers that become codes at load are read one after the other: their floats are never all in memory, and what was read is let go."""

import subprocess
import sys
import weakref

import pytest
from safetensors.torch import load_file

from paged.model.loading import load_model
from paged.model.quantised.files import TensorFiles

LAYERS, LAYER_BYTES = 6, 4 * (4 * 512 * 512 + 3 * 512 * 2048)
GROWTH = """
import resource, sys
from paged.model.loading import load_model

small, folder = sys.argv[1:]
# With all that a process has once.
load_model(small, quantization="int8")
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
load_model(folder, quantization="int8")
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts as Linux does")
def test_a_process_that_loads_int8_grows_by_codes_and_few_floats(checkpoint):
    folder = checkpoint(
        "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=LAYERS, head_dim=128, num_key_value_heads=4
    )
    ran = subprocess.run([sys.executable, "-c", GROWTH, "embedded", folder], capture_output=True, text=True, check=True)
    codes = LAYERS * LAYER_BYTES // 4
    # 57 to 66 MiB, with what an allocator keeps; all floats and the codes beside them would be 120.
    assert int(ran.stdout) < codes + 4 * LAYER_BYTES


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_a_layers_floats_are_gone_when_the_next_is_read(checkpoint, architecture, monkeypatch):
    """Of all that was read from files one by one, no more than a layer's weight is there, or one layer's experts with what they are made of."""
    read, largest, there = TensorFiles.read, 0, []

    def noted(files, name):
        nonlocal largest
        found = read(files, name)
        there.append(weakref.ref(found))
        largest = max(largest, sum(each().nbytes for each in there if each() is not None))
        return found

    folder = checkpoint(architecture, hidden_size=64, intermediate_size=96)
    monkeypatch.setattr(TensorFiles, "read", noted)
    load_model(folder, quantization="int8")
    weights = load_file(folder / "model.safetensors")
    of_layer = sum(each.nbytes for name, each in weights.items() if ".layers.0." in name)
    of_one = max(each.nbytes for name, each in weights.items() if ".layers.0." in name)
    assert len(there) > 10
    assert largest <= (of_layer if architecture == "mixtral" else of_one)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_parameter_keeps_a_files_mapping(checkpoint):
    """One would keep all of what was read of the file resident."""
    folder = checkpoint("llama")
    model = load_model(folder)
    with open("/proc/self/maps") as maps:
        mapped = [line for line in maps if str(folder) in line]
    assert model.module is not None and mapped == []

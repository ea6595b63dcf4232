"""Which Adam and which norms a rank takes: with NVIDIA's Apex, half an install of it, and PyPI's package of that name.

The package here is a few lines in its shape: what it is called for runs on a device only.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
APEX = {
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": "from torch.optim import SGD as FusedSGD\nfrom torch.optim import AdamW\n"
    "class FusedAdam(AdamW): pass\n",
    "apex/multi_tensor_apply/__init__.py": "def multi_tensor_applier(*args): pass\n",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": "def fused_rms_norm_affine(x, weight, normalized_shape, eps=1e-6):\n"
    "    return 'fused', tuple(x.shape), tuple(normalized_shape), eps\n",
    "amp_C.py": "def _kernel(*args): pass\nmulti_tensor_l2norm = multi_tensor_scale = _kernel\n",
    "fused_layer_norm_cuda.py": "",
}
CHOICE = """
import torch
from types import SimpleNamespace
torch.cuda.is_available = lambda: {cuda}
from roll_async.trainer.megatron import cpu_shim
cpu_shim.install(cuda={cuda})
from megatron.core.optimizer import Adam
from roll_async.trainer.megatron.model.layer_spec import LocalNorm, fused_norm
print(Adam.__module__.partition(".")[0], "norm of apex" if fused_norm() else "norm of torch")
config = SimpleNamespace(
    params_dtype=torch.float32, sequence_parallel=False, normalization="RMSNorm", layernorm_zero_centered_gamma=False
)
norm = LocalNorm(config, 4, eps=1e-3)
print(norm(torch.ones(2, 4)))
"""


def choice(folder, files, *, cuda):
    """Lines of a process that sees these files and has a device, or has none."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    script = CHOICE.format(cuda=cuda)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=patient(100), env=env)
    return done.stdout.splitlines() if done.returncode == 0 else done.stderr.splitlines()[-1:]


@pytest.mark.slow
def test_where_nvidia_s_apex_is_installed_a_rank_on_a_device_takes_its_adam_and_its_norm(tmp_path):
    adam_and_norm, computed = choice(tmp_path, APEX, cuda=True)
    assert adam_and_norm == "apex norm of apex"
    assert computed == "('fused', (2, 4), (4,), 0.001)"


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["device", "extensions"])
def test_without_a_device_or_without_its_extensions_a_rank_takes_torch_s(tmp_path, missing):
    files = {name: text for name, text in APEX.items() if missing == "device" or name.startswith("apex/")}
    adam_and_norm, *computed = choice(tmp_path, files, cuda=missing != "device")
    assert adam_and_norm == "torch norm of torch" and computed[0].startswith("tensor([[")


def test_the_package_of_that_name_on_pypi_is_refused_with_both_lines(tmp_path):
    (line,) = choice(tmp_path, {"apex/__init__.py": "import pyramid\n", "apex/lib/__init__.py": ""}, cuda=False)
    assert line.startswith("ValueError: the package apex that is installed here is not NVIDIA's Apex")
    assert "pip uninstall apex" in line and "git+https://github.com/NVIDIA/apex" in line

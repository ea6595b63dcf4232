"""Whether Transformer Engine and NVIDIA's Apex import here. To be asked before megatron-core is imported.

megatron-core takes an ImportError for "not installed" and works without. Half an install (the wheel without its core
library, one for another CUDA, Apex without its CUDA extensions) raises something else, or raises later, which would end
megatron-core's import or the first step: such a package is hidden from this process, and the reason kept for the log.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path

PACKAGE = "transformer_engine"
APEX = "apex"
APEX_LINE = (
    'pip install --no-build-isolation --config-settings "--build-option=--cpp_ext" --config-settings '
    '"--build-option=--cuda_ext" git+https://github.com/NVIDIA/apex'
)
_APEX_EXTENSIONS = ("amp_C", "fused_layer_norm_cuda")
"""Its fused Adam, and its norms."""


@cache
def problem() -> str | None:
    """Why Transformer Engine cannot be used by this process; None where it imports."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"the package {PACKAGE} is not installed"
    return _import_or_hide(PACKAGE, f"{PACKAGE}.pytorch")


@cache
def apex_problem(*, cuda: bool) -> str | None:
    """Why Apex's fused Adam and norms cannot be used by this process; None where they import. `cuda`: it sees a device,
    without which they compute nothing. Raises ValueError for another package of that name.
    """
    if importlib.util.find_spec(APEX) is None:
        return f"the package {APEX} is not installed"
    if (other := other_apex()) is not None:
        raise ValueError(other)
    if not cuda:
        sys.modules[APEX] = None  # type: ignore[assignment]  # as below
        return "no CUDA device"
    return _import_or_hide(APEX, "torch", *_APEX_EXTENSIONS, "apex.optimizers", "apex.normalization")


def other_apex() -> str | None:
    """What to do about a package apex that is not NVIDIA's, which has an optimizer; nothing of it is imported."""
    spec = importlib.util.find_spec(APEX)
    if spec is None or any((Path(folder) / "optimizers").is_dir() for folder in spec.submodule_search_locations or ()):
        return None
    return (
        "the package apex that is installed here is not NVIDIA's Apex but PyPI's of the same name, for web sites; "
        f"pip uninstall apex, and where NVIDIA's is wanted: {APEX_LINE}"
    )


def _import_or_hide(package: str, *modules: str) -> str | None:
    try:
        for module in modules:
            importlib.import_module(module)
    except (ImportError, RuntimeError, OSError) as error:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            # Parts that did import would be found here, whatever becomes of the package.
            del sys.modules[name]
        sys.modules[package] = None  # type: ignore[assignment]  # Python's way to say: importing it fails
        return f"{package} is installed, but does not import: {type(error).__name__}: {str(error).splitlines()[0]}"
    return None

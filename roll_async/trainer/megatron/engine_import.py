"""Whether Transformer Engine imports here. To be asked before megatron-core is imported.

megatron-core takes an ImportError for "not installed" and works without. Half an install (the wheel without its core
library, or one for another CUDA) raises RuntimeError or OSError instead, which would end the import of megatron-core
itself: such a package is hidden from this process, and the reason kept for the log.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

PACKAGE = "transformer_engine"
_problems: dict[str, str | None] = {}


def problem() -> str | None:
    """Why the package cannot be used by this process; None where it imports."""
    if PACKAGE not in _problems:
        _problems[PACKAGE] = _try()
    return _problems[PACKAGE]


def _try() -> str | None:
    if importlib.util.find_spec(PACKAGE) is None:
        return f"the package {PACKAGE} is not installed"
    try:
        importlib.import_module(f"{PACKAGE}.pytorch")
    except (ImportError, RuntimeError, OSError) as error:
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.modules[PACKAGE] = None  # type: ignore[assignment]  # Python's way to say: importing it fails
        return f"{PACKAGE} is installed, but does not import: {type(error).__name__}: {str(error).splitlines()[0]}"
    return None

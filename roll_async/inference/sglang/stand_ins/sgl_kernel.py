"""SGLang's kernels are compiled for CUDA only. On CPU it imports their names and takes its paths in plain torch.

Its record of experts asks CUDA to page-lock a buffer in host memory, without a look at the device: here nothing copies
from a device, so the answer is yes.
"""

from typing import Any

import torch


class _NothingToLock:
    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        return 0


torch.cuda.cudart = _NothingToLock  # pyright: ignore[reportAttributeAccessIssue]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU version")

    return missing

"""The parts of Transformer Engine that Megatron-Core 0.16 touches, in plain torch, so that its real layer spec, its
optimizer's way of counting and its parameter names are tested where no CUDA is. Signatures as of version 2.11.
"""

from . import common, pytorch

__version__ = "2.11.0"
__all__ = ["common", "pytorch"]

"""What the processor of this machine computes by itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""As Linux names the instructions of x86 (AVX-512 BF16, AMX) and of Arm for products of bfloat16."""


@cache
def multiplies_bf16() -> bool:
    """Whether this processor has instructions for bfloat16 products. Without them they are emulated, and slower than
    float32. False where the system does not tell.
    """
    try:
        return tells_bf16(Path("/proc/cpuinfo").read_text())
    except OSError:
        return False


def tells_bf16(cpuinfo: str) -> bool:
    """Whether the text of /proc/cpuinfo names such instructions."""
    for line in cpuinfo.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _BF16_FLAGS.isdisjoint(flags.split())
    return False

"""What the processor of this machine computes by itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""As Linux names the instructions of x86 (AVX-512 BF16, AMX) and of Arm for products of bfloat16."""


def multiplies_bf16() -> bool:
    """Whether this processor has instructions for bfloat16 products. Without them they are emulated, and slower than
    float32. False where the system does not tell.
    """
    return not _BF16_FLAGS.isdisjoint(flags(cpuinfo()))


def default_dtype(*, on_devices: bool) -> str:
    """Number format where none is chosen: bf16, and fp32 on a processor that would emulate it."""
    return "bf16" if on_devices or multiplies_bf16() else "fp32"


def flags(text: str) -> list[str]:
    """The instructions of the first processor in the text of /proc/cpuinfo."""
    told = properties(text)
    return told.get("flags", told.get("Features", "")).split()


@cache
def cpuinfo() -> str:
    """/proc/cpuinfo; empty where the system has none."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def properties(text: str) -> dict[str, str]:
    """Of the first processor, by name."""
    lines = text.strip().partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

from . import distributed, fp8, ops, optimizers
from .attention import DotProductAttention
from .fp8 import fp8_autocast, fp8_model_init
from .layers import Fp8Padding, Fp8Unpadding, GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
    "optimizers",
]

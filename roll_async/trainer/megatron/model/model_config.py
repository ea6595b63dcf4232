"""Megatron's TransformerConfig from a Hugging Face config.json and the layout of this role."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.folders.hf_folder import HfFolder
from roll_async.checkpoint.hf_names.families import family_for
from roll_async.checkpoint.hf_names.table import Family
from roll_async.checkpoint.rotary import Rotary
from roll_async.checkpoint.transforms import HeadLayout
from roll_async.trainer.megatron import weight_gradients
from roll_async.trainer.megatron.compiled import compiles
from roll_async.trainer.megatron.model.layer_spec import LayerChoice, choose_layers
from roll_async.trainer.megatron.settings import MegatronSettings, ParallelSizes

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}

_NO_FUSION = {
    "bias_dropout_fusion": False,  # without dropout and bias it is one addition as it is
    "masked_softmax_fusion": False,  # of an attention that is not used here
    "apply_rope_fusion": False,  # Transformer Engine's; local layers rotate by themselves (attention.py)
    "persist_layer_norm": False,  # Apex's, of LayerNorm
}


def transformer_config(config: HfConfig, family: Family, settings: MegatronSettings) -> TransformerConfig:
    """Megatron's view of the model. Raises ValueError for a model or layout it cannot be built for."""
    family.require_activation(config)
    heads, parallel = HeadLayout.of(config), settings.parallel
    dtype = TORCH_DTYPES[settings.dtype]
    fields: dict[str, object] = {
        "num_layers": config.integer("num_hidden_layers"),
        "hidden_size": config.integer("hidden_size"),
        "num_attention_heads": config.integer("num_attention_heads"),
        "num_query_groups": heads.num_groups,
        "kv_channels": heads.head_size,
        "ffn_hidden_size": config.integer("intermediate_size", "moe_intermediate_size"),
        "gated_linear_unit": True,
        "activation_func": family.activation,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.number("rms_norm_eps", "norm_eps"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": settings.dtype == "bf16",
        "fp16": settings.dtype == "fp16",
        "use_cpu_initialization": True,
        # Every weight is loaded: drawing values first would take longer than that, minutes for billions of them.
        "perform_initialization": False,
        # SwiGLU as a kernel forward and one backward. Its steps one by one would each round to the model's dtype.
        "bias_activation_fusion": family.activation == "silu" and compiles(_device()),
        "gradient_accumulation_fusion": weight_gradients.fused(_device()),
        **_NO_FUSION,
        **_layout(parallel, settings.moe_dispatcher),
        # Gradients are plain sums of all micro-batches and ranks: the loss knows the denominators of the whole step.
        "calculate_per_token_loss": True,
        **family.fields(config),
        # Local layers run one expert after another; Megatron's own grouped experts have other parameters.
        "moe_grouped_gemm": layers_of(settings).all_engine,
        **({"moe_aux_loss_coeff": settings.moe_aux_loss_coeff} if settings.moe_aux_loss_coeff else {}),
        **({"attention_backend": AttnBackend.flash} if settings.flash_attention else {}),
        **settings.recompute,
        # Last: what the user hands on replaces anything above.
        **settings.extra,
    }
    fields["activation_func"] = _ACTIVATIONS[str(fields["activation_func"])]
    _demand_divisible(config, fields, parallel)
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    result = kind(**fields)  # type: ignore[arg-type]
    if kind is TransformerConfig:
        _set_attention_factor(result, Rotary.of(config, family.rotary_fraction).attention_factor())
    return result


def layers_of(settings: MegatronSettings) -> LayerChoice:
    """What the layers of a role are made of on this machine. Raises ValueError as `choose_layers` does."""
    local_only = None
    if settings.transformer_impl != "local":
        config = HfFolder(settings.model_folder).config
        local_only = _local_only(config, family_for(config))
    return choose_layers(settings.transformer_impl, adapters=settings.lora_rank > 0, local_only=local_only)


def _local_only(config: HfConfig, family: Family) -> str | None:
    """Why the model has local layers alone; None: it has not."""
    fields = family.fields(config)
    if fields.get("linear_attention_freq"):
        return "Transformer Engine has no gated delta net that knows packed rows"
    if fields.get("softmax_type", "vanilla") != "vanilla":
        return "attention sinks were not tried with Transformer Engine"
    if family.reads_images:
        return "Transformer Engine rotates by no three axes of positions"
    if Rotary.local(config, scaled=family.scaled_windows) is not None:
        return "Transformer Engine rotates windowed layers as the rest"
    return None


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _layout(parallel: ParallelSizes, dispatcher: str) -> dict[str, object]:
    interleaved = parallel.virtual_pipeline is not None
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": parallel.sequence_parallel,
        # Interleaved on two ranks, both neighbours are one process: batched exchanges would swap messages silently.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Stages tell each other the shape of every micro-batch. The allgather dispatcher cannot work with that, and the
        # interleaved schedule pairs shapes of different micro-batches: there all have one shape.
        "variable_seq_lengths": parallel.pipeline > 1 and dispatcher == "alltoall" and not interleaved,
        "moe_token_dispatcher_type": dispatcher,
    }


def _demand_divisible(config: HfConfig, fields: dict[str, object], parallel: ParallelSizes) -> None:
    """Sizes that ranks share evenly; Megatron itself stops with an assertion deep inside a layer."""
    sizes: dict[str, tuple[object, int]] = {
        "vocab_size": (config.integer("vocab_size"), parallel.tensor),
        "num_attention_heads": (fields["num_attention_heads"], parallel.tensor),
        "num_key_value_heads": (fields["num_query_groups"], parallel.tensor),
        "intermediate_size": (fields["ffn_hidden_size"], parallel.tensor),
        "moe_intermediate_size": (fields.get("moe_ffn_hidden_size") or 0, parallel.expert_tensor),
        "num_hidden_layers": (fields["num_layers"], parallel.pipeline * (parallel.virtual_pipeline or 1)),
        "num_experts": (fields.get("num_moe_experts") or 0, parallel.expert),
        "linear_num_key_heads": (fields.get("linear_num_key_heads") or 0, parallel.tensor),
    }
    for name, (size, ranks) in sizes.items():
        assert isinstance(size, int)
        if size % ranks:
            raise ValueError(f"{config.source}: {name}={size} cannot be shared evenly by {ranks} ranks")
    if fields.get("linear_attention_freq") and parallel.context > 1:
        raise ValueError(
            f"{config.source}: the state of a gated delta net goes through a row from its start; context_parallel_size="
            f"{parallel.context} must be 1"
        )
    if fields.get("num_moe_experts") and parallel.tensor > 1 and not parallel.sequence_parallel:
        raise ValueError(
            f"{config.source}: a model with experts and tensor_model_parallel_size={parallel.tensor} needs "
            "sequence_parallel: true"
        )
    if fields.get("num_moe_experts") and fields["add_bias_linear"] and parallel.expert_tensor > 1:
        raise ValueError(
            f"{config.source}: experts with biases cannot be split; expert_tensor_parallel_size="
            f"{parallel.expert_tensor} must be 1"
        )
    if parallel.expert > 1 and not fields.get("num_moe_experts"):
        raise ValueError(f"{config.source}: expert_model_parallel_size={parallel.expert}, but the model has no experts")


def _set_attention_factor(config: TransformerConfig, factor: float) -> None:
    """Megatron multiplies cosines and sines by 0.1 * mscale * ln(scaling_factor) + 1, read from these attributes."""
    if factor != 1.0:
        # ln(e) = 1, so that the formula gives 0.1 * mscale + 1 = factor.
        config.yarn_rotary_scaling_factor = math.e  # type: ignore[attr-defined]
        config.yarn_mscale = (factor - 1.0) * 10.0  # type: ignore[attr-defined]
        config.yarn_mscale_all_dim = 0.0  # type: ignore[attr-defined]

"""A Megatron GPT model from a Hugging Face folder, and back, under any tensor and pipeline layout."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from roll_async.checkpoint.hf_folder import HfFolder
from roll_async.checkpoint.hf_names.families import family_of
from roll_async.checkpoint.hf_names.table import Family
from roll_async.checkpoint.transforms import HeadLayout, shard, to_hf, to_megatron, unshard
from roll_async.trainer.megatron.layer_spec import local_spec
from roll_async.trainer.megatron.settings import MegatronSettings

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def transformer_config(hf: HfFolder, family: Family, settings: MegatronSettings) -> TransformerConfig:
    """Megatron's view of a Hugging Face config. Fusions that would call torch.compile are off."""
    config, parallel = hf.config, settings.parallel
    dtype = TORCH_DTYPES[settings.dtype]
    heads = int(config["num_attention_heads"])  # type: ignore[arg-type]
    hidden = int(config["hidden_size"])  # type: ignore[arg-type]
    fields: dict[str, object] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads", heads),
        "kv_channels": config.get("head_dim") or hidden // heads,
        "ffn_hidden_size": config["intermediate_size"],
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": settings.dtype == "bf16",
        "fp16": settings.dtype == "fp16",
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "sequence_parallel": parallel.sequence_parallel,
        "variable_seq_lengths": parallel.pipeline > 1,
        "moe_token_dispatcher_type": "alltoall",
    }
    return TransformerConfig(**{**fields, **family.spec, **settings.recompute, **settings.extra})  # type: ignore[arg-type]


def rotary_base(config: dict[str, object]) -> float:
    """transformers 5 keeps it in rope_parameters, older files at the top."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    assert isinstance(nested, dict)
    kind = nested.get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"rope_type {kind!r} is not supported yet; only default rotary embeddings are")
    return float(nested.get("rope_theta", config.get("rope_theta", 10000.0)))  # type: ignore[arg-type]


class HfBackedModel:
    """A Megatron model that knows its Hugging Face names."""

    def __init__(self, settings: MegatronSettings, device: torch.device) -> None:
        self._settings = settings
        self._hf = HfFolder(settings.model_folder)
        architectures = self._hf.config.get("architectures")
        assert isinstance(architectures, list), "config.json names no architecture"
        self._family = family_of(architectures[0])
        self.config = transformer_config(self._hf, self._family, settings)
        self.tied = bool(self._hf.config.get("tie_word_embeddings", False))
        self.heads = HeadLayout(
            num_groups=self.config.num_query_groups or self.config.num_attention_heads,
            heads_per_group=self.config.num_attention_heads // (self.config.num_query_groups or 1),
            head_size=self.config.kv_channels or 0,
        )
        torch.manual_seed(settings.seed)
        self.module = GPTModel(
            config=self.config,
            transformer_layer_spec=local_spec(self.config),
            vocab_size=int(self._hf.config["vocab_size"]),  # type: ignore[call-overload]
            max_sequence_length=int(self._hf.config["max_position_embeddings"]),  # type: ignore[call-overload]
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=self.tied,
            position_embedding_type="rope",
            rotary_base=int(rotary_base(self._hf.config)),
            parallel_output=True,
        )
        self._load()
        self.module.to(device=device)

    def _load(self) -> None:
        rank, size = parallel_state.get_tensor_model_parallel_rank(), self._settings.parallel.tensor
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                match = self._family.match(self._global_name(name))
                names = match.hf_names
                if names == ("lm_head.weight",) and self.tied:
                    names = ("model.embed_tokens.weight",)
                full = to_megatron(match.row, [self._hf.tensor(n) for n in names], self.heads)
                part = shard(match.row, full, rank=rank, size=size)
                if part.shape != parameter.shape:
                    raise ValueError(
                        f"{names[0]} of {self._hf.path} has shape {tuple(part.shape)} where Megatron's {name} has {tuple(parameter.shape)}"
                    )
                parameter.copy_(part)

    def _global_name(self, name: str) -> str:
        """Layer numbers of the whole model; a pipeline stage counts its own from 0."""
        found = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        if not found:
            return name
        layers = self.module.decoder.layers
        return f"decoder.layers.{layers[int(found[1])].layer_number - 1}.{found[2]}"

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """HF-named full tensors on every rank, stage by stage; collective. Holds one Megatron tensor at a time."""
        pipeline = self._settings.parallel.pipeline
        stage = parallel_state.get_pipeline_model_parallel_rank()
        for source in range(pipeline):
            own = list(self._own_tensors()) if source == stage else None
            if pipeline == 1:
                yield from self._gathered(own or [])
                return
            yield from self._broadcast(own, source)

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            if not (self.tied and name == "output_layer.weight"):
                yield self._global_name(name), parameter.detach()

    def _gathered(self, tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, part in tensors:
            match = self._family.match(name)
            full = unshard(match.row, self._all_parts(part) if match.row.tp_dim is not None else [part])
            yield from zip(match.hf_names, to_hf(match.row, full, self.heads), strict=True)

    def _all_parts(self, part: Tensor) -> list[Tensor]:
        if self._settings.parallel.tensor == 1:
            return [part]
        parts = [torch.empty_like(part) for _ in range(self._settings.parallel.tensor)]
        dist.all_gather(parts, part.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        return parts

    def _broadcast(self, own: list[tuple[str, Tensor]] | None, source: int) -> Iterator[tuple[str, Tensor]]:
        """Tensors of one pipeline stage to all stages of the replica, one at a time."""
        group = parallel_state.get_pipeline_model_parallel_group()
        sender = dist.get_global_rank(group, source)
        mine = list(self._gathered(own)) if own is not None else []
        header: list[object] = [[(n, tuple(t.shape)) for n, t in mine] if own is not None else None]
        dist.broadcast_object_list(header, src=sender, group=group)
        names = header[0]
        assert isinstance(names, list)
        device, dtype = next(self.module.parameters()).device, self.config.params_dtype
        for index, (name, shape) in enumerate(names):
            tensor = mine[index][1].contiguous() if own is not None else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, src=sender, group=group)
            yield name, tensor

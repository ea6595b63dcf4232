"""A Megatron GPT model from a Hugging Face folder, and back, under any tensor, pipeline and expert layout."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from roll_async.checkpoint.folders.hf_folder import HfFolder
from roll_async.checkpoint.hf_names.families import family_for, is_tied
from roll_async.checkpoint.hf_names.table import Match
from roll_async.checkpoint.hf_names.value_head import VALUE_HEAD
from roll_async.checkpoint.lora import merged
from roll_async.checkpoint.lora_targets import target_layers
from roll_async.checkpoint.rotary import Rotary
from roll_async.checkpoint.transforms import HeadLayout, shard, to_hf, to_megatron, unshard
from roll_async.observe.trace import starting
from roll_async.trainer.megatron import ranks
from roll_async.trainer.megatron.model.attention import LONGEST_SHARED_ROW, Rotation
from roll_async.trainer.megatron.model.images import add_tower
from roll_async.trainer.megatron.model.layer_spec import block_spec
from roll_async.trainer.megatron.model.lora import (
    ADAPTER,
    Adapter,
    LoraSettings,
    adapter_of,
    add_adapters,
)
from roll_async.trainer.megatron.model.model_config import TORCH_DTYPES, layers_of, transformer_config
from roll_async.trainer.megatron.model.model_flops import model_flops
from roll_async.trainer.megatron.model.output_head import OutputHead, ValueHead
from roll_async.trainer.megatron.settings import MegatronSettings
from roll_async.trainer.megatron.state.weight_parts import adapter_parts, hf_parts, owners
from roll_async.weight_sync.bucket import Content
from roll_async.weight_sync.transfer import TensorPart

__all__ = ["TORCH_DTYPES", "HfBackedModel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """A parameter (or buffer) of this rank, and what it is part of."""

    tensor: Tensor
    name: str
    """Megatron name, layer and expert counted over the whole model."""
    adapter: Adapter | None
    """Adds to the tensor."""
    sharded: bool
    """Whether tensor parallelism splits it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outline:
    """What the other pipeline stages must know to receive a tensor."""

    names: tuple[str, ...]
    """One name, or the same expert slot on each expert-parallel rank."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class HfBackedModel:
    """A Megatron model that knows its Hugging Face names."""

    def __init__(self, settings: MegatronSettings, device: torch.device, *, with_weights: bool = True) -> None:
        """`with_weights=False`: the caller fills the weights, which hold whatever was in memory; the folder needs only
        config.json, and there is no export.
        """
        self._settings = settings
        check_context(settings)
        self._hf = HfFolder(settings.model_folder)
        # A reward model's layers are those of its language model; its head becomes the critic's.
        self._family = family_for(self._hf.config)
        self.config = transformer_config(self._hf.config, self._family, settings)
        self.tied = is_tied(self._hf.config) and not settings.with_value_head
        self.heads = HeadLayout.of(self._hf.config)
        self.flops = model_flops(self._hf.config, settings)
        torch.manual_seed(settings.seed)
        stages = range(settings.parallel.virtual_pipeline or 1)
        with starting("", "model"):
            self.chunks = [self._build(stage if len(stages) > 1 else None) for stage in stages]
        self._sharded: dict[str, bool] = {}
        self._outlines: list[list[_Outline]] | None = None
        if with_weights:
            with starting("", "load"):
                self._load()
        if settings.lora_rank:
            self._add_adapters()
        self._freeze(settings.frozen)
        for chunk in self.chunks:
            chunk.to(device=device)

    @property
    def module(self) -> GPTModel:
        """This rank's only chunk."""
        assert len(self.chunks) == 1, "an interleaved pipeline has several chunks"
        return self.chunks[0]

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters by their names in the whole model: global layer and expert numbers."""
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                yield self._global_name(chunk, name), parameter

    def _add_adapters(self) -> None:
        settings = self._settings
        lora = LoraSettings(
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            targets=settings.lora_targets,
            dropout=settings.lora_dropout,
        )
        found: set[str] = set()
        for chunk in self.chunks:
            names = {name: self._global_name(chunk, name) for name, _ in chunk.named_parameters()}
            # PEFT's halves of a tensor that holds all experts have another form.
            names = {name: whole for name, whole in names.items() if not self.match(whole).row.transform.transposes}
            found |= add_adapters(chunk, lora, names)
            if settings.with_value_head and chunk.post_process:
                # It starts at zeros, which pass no gradient on: frozen, a critic would never learn.
                chunk.output_layer.requires_grad_(True)
        everywhere = _union(found)
        missing = (target_layers(lora.targets) or set()) - everywhere
        if missing or not everywhere:
            kind = sorted(missing)[0] if missing else "at all"
            raise ValueError(
                f"model_args.lora_target {list(lora.targets)}: no layer {kind} of this model takes an adapter; "
                "name others, or all-linear"
            )

    def _freeze(self, prefixes: Sequence[str]) -> None:
        """Raises ValueError for a prefix that no parameter of the whole model has."""
        found: set[str] = set()
        for name, parameter in self.named_parameters():
            names = (name, *(() if ADAPTER in name else self.match(name).hf_names))
            hits = {prefix for prefix in prefixes if any(n.startswith(prefix) for n in names)}
            if hits:
                parameter.requires_grad_(False)
            found |= hits
        missing = set(prefixes) - _union(found)
        if missing:
            raise ValueError(f"model_args.freeze_module_prefix {sorted(missing)[0]!r}: no parameter begins with it")

    def train(self, mode: bool) -> None:
        """Training or evaluation mode of every chunk."""
        for chunk in self.chunks:
            chunk.train(mode)

    def _build(self, stage: int | None) -> GPTModel:
        """The layers of this rank; `stage` counts the chunks of an interleaved pipeline."""
        config = self._hf.config
        rotary = Rotary.of(config, self._family.rotary_fraction)
        context = config.integer("max_position_embeddings")
        frequencies = rotary.frequencies(int(self.heads.head_size * rotary.fraction), context)
        layers = layers_of(self._settings)
        rotation = local_rotation = None
        if (local := Rotary.local(config, scaled=self._family.scaled_windows)) is not None:
            turned = local.frequencies(self.heads.head_size, context)
            local_rotation = Rotation(turned, local.attention_factor(), interleaved=False)
        if not layers.engine_attention and not self.config.multi_latent_attention:
            interleaved = self.config.rotary_interleaved
            factor = rotary.attention_factor()
            rotation = Rotation(frequencies, factor, interleaved=interleaved, sections=rotary.sections)
        module = GPTModel(
            config=self.config,
            transformer_layer_spec=block_spec(  # pyright: ignore[reportArgumentType]  # Megatron takes a block's, too
                self.config,
                self._family,
                layers=layers,
                rotation=rotation,
                local_rotation=local_rotation,
                stage=stage,
            ),
            vocab_size=config.integer("vocab_size"),
            max_sequence_length=context,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=self.tied,
            position_embedding_type="rope" if rotation is None else "none",
            rotary_percent=rotary.fraction,
            rotary_base=int(rotary.base),
            parallel_output=True,
            vp_stage=stage,
        )
        if rotation is None and rotary.kind != "default" and not self.config.multi_latent_attention:
            module.rotary_pos_emb.inv_freq = frequencies
        if self._family.reads_images and module.pre_process:
            add_tower(module, config)
        _mark_shards(module)
        _mark_experts(module)
        _copy_before_biases(module)
        if self.config.recompute_granularity == "full" and module.pre_process:
            module.embedding.register_forward_hook(_carry_gradients)
        if self._family.scaled_embedding and module.pre_process:
            # Rounded to the model's dtype first, as it was trained.
            scale = torch.tensor(config.integer("hidden_size") ** 0.5, dtype=self.config.params_dtype)
            module.embedding.register_forward_hook(lambda _, given, output: output * scale.to(output.device))
        if module.post_process:
            module.output_layer.__class__ = OutputHead  # pyright: ignore[reportAttributeAccessIssue]  # same fields
        if self._settings.with_value_head and module.post_process:
            module.output_layer = ValueHead(self.config)  # pyright: ignore[reportAttributeAccessIssue]  # same calls
        return module

    # Loading

    def _load(self) -> None:
        with torch.no_grad():
            for chunk in self.chunks:
                for local_name, tensor in _tensors(chunk):
                    self._load_one(self._global_name(chunk, local_name), tensor)

    def _load_one(self, name: str, target: Tensor) -> None:
        match = self.match(name)
        names = match.hf_names
        if match is VALUE_HEAD and names[0] not in self._hf:
            self._sharded[name] = False
            return  # a language model has no value head: it starts at zero
        if names == ("lm_head.weight",) and self.tied:
            # The last of several stages holds a copy of the embedding as its output layer.
            names = ("model.embed_tokens.weight",)
        full = to_megatron(match.row, [self._hf.tensor(n) for n in names], self.heads)
        self._sharded[name] = full.shape != target.shape
        part = shard(match.row, full, rank=self._tensor_group(match).rank(), size=self._tensor_group(match).size())
        if not self._sharded[name]:
            part = full  # a row may name a split that this layer does not make
        if part.shape != target.shape:
            raise ValueError(
                f"{names[0]} of {self._hf.path} has shape {tuple(part.shape)}, Megatron's {name} {tuple(target.shape)}"
            )
        target.copy_(part)

    def match(self, name: str) -> Match:
        """The HF counterparts of a Megatron name."""
        if self._settings.with_value_head and name == VALUE_HEAD.name:
            return VALUE_HEAD
        return self._family.match(name)

    @staticmethod
    def _tensor_group(match: Match) -> dist.ProcessGroup:
        if match.row.is_expert:
            return ranks.expert_tensor_group()
        return ranks.tensor_group()

    def _global_name(self, chunk: GPTModel, name: str) -> str:
        """Layer and expert numbers of the whole model; a stage counts its layers, and a rank its experts, from 0."""
        found = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        if not found:
            return name
        layer = chunk.decoder.layers[int(found[1])]
        assert isinstance(layer, TransformerLayer)
        rest = found[2]
        if self._settings.parallel.expert > 1:
            rest = re.sub(
                r"(?<=local_experts\.)\d+|(?<=\.weight)\d+$|(?<=\.bias)\d+$",
                lambda e: str(self._global_expert(int(e[0]))),
                rest,
            )
        return f"decoder.layers.{layer.layer_number - 1}.{rest}"

    def _global_expert(self, local: int, rank: int | None = None) -> int:
        size = parallel_state.get_expert_model_parallel_world_size()
        rank = parallel_state.get_expert_model_parallel_rank() if rank is None else rank
        return rank * ((self.config.num_moe_experts or 0) // size) + local

    # Export

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """HF-named full tensors on every rank, stage by stage; collective. Holds one Megatron tensor at a time (of an
        expert: one of each expert-parallel rank).
        """
        group, stage = ranks.pipeline_group(), parallel_state.get_pipeline_model_parallel_rank()
        own = list(self._held())
        if self._outlines is None:
            self._outlines = self._gather_outlines(own)
        for source, outlines in enumerate(self._outlines):
            for index, outline in enumerate(outlines):
                fulls = self._full(own[index]) if source == stage else self._receive(outline)
                for name, full in zip(outline.names, fulls, strict=True):
                    if len(self._outlines) > 1:
                        dist.broadcast(full, src=dist.get_global_rank(group, source), group=group)
                    match = self.match(name)
                    yield from zip(match.hf_names, to_hf(match.row, full, self.heads), strict=True)

    def parts(self, content: Content = Content.MERGED) -> Iterator[TensorPart]:
        """What this rank sends of the model in a weight push: its own parts of the HF tensors. Ranks that hold the same
        share the sending; together they send every tensor of the content once.
        """
        for one, match, place in self._sent():
            if content is not Content.ADAPTERS:
                weight = self._merged(one) if content is Content.MERGED else one.tensor
                yield from hf_parts(match, weight, self.heads, **place)
            if content is not Content.MERGED and (adapter := one.adapter) is not None:
                down, up = (half.to(one.tensor.dtype) for half in adapter.halves(scaled=True))  # as in training
                yield from adapter_parts(match, (down, up), self.heads, columns=adapter.columns, **place)

    def adapters(self) -> Iterator[TensorPart]:
        """What this rank adds to an export of the adapters: float32, B without the scale. Together the ranks give every
        half once.
        """
        for one, match, place in self._sent():
            if one.adapter is not None:
                halves = one.adapter.halves(scaled=False)
                yield from adapter_parts(match, halves, self.heads, columns=one.adapter.columns, **place)

    def _sent(self) -> Iterator[tuple[_Held, Match, dict[str, int]]]:
        """What this rank sends of what it holds, and as which part of the whole."""
        held = list(self._held())
        kinds = [ranks.HolderKind(expert=self.match(h.name).row.is_expert, sharded=h.sharded) for h in held]
        sends = [True] * len(held)
        # By kind, because only parameters of one kind have the same ranks to share the sending with.
        for kind in set(kinds):
            own = [i for i, other in enumerate(kinds) if other == kind]
            number, count = ranks.holders(kind)
            for i, owner in zip(own, owners((held[i].tensor.numel() for i in own), count), strict=True):
                sends[i] = owner == number
        for one in (h for h, sent in zip(held, sends, strict=True) if sent):
            match = self.match(one.name)
            group = self._tensor_group(match)
            yield one, match, {"rank": group.rank(), "size": group.size()} if one.sharded else {"rank": 0, "size": 1}

    def _merged(self, held: _Held) -> Tensor:
        """This rank's part of the tensor with its adapter."""
        if held.adapter is None:
            return held.tensor
        match, delta = self.match(held.name), held.adapter.delta()
        # The place in the whole tensor: the rounding of the sum must not depend on the layout.
        places = torch.arange(math.prod(self._outline(held).shape), dtype=torch.int32, device=delta.device)
        places = places.view(self._outline(held).shape)
        if held.sharded:
            group = self._tensor_group(match)
            places = shard(match.row, places, rank=group.rank(), size=group.size())
        return merged(held.tensor, delta, match.hf_names[0], places)

    def _held(self) -> Iterator[_Held]:
        """Parameters of this rank that the exported model has; the tied copy of the embedding is left out."""
        for chunk in self.chunks:
            for local_name, tensor in _tensors(chunk):
                name = self._global_name(chunk, local_name)
                if not (self.tied and name == "output_layer.weight"):
                    yield _Held(
                        tensor=tensor.detach(),
                        name=name,
                        adapter=adapter_of(chunk, local_name) if self._settings.lora_rank else None,
                        sharded=self._sharded[name],
                    )

    def _gather_outlines(self, own: Sequence[_Held]) -> list[list[_Outline]]:
        """The tensors of each pipeline stage, known to all stages. Once: names and shapes do not change."""
        outlines = [self._outline(held) for held in own]
        group = ranks.pipeline_group()
        if group.size() == 1:
            return [outlines]
        gathered: list[list[_Outline]] = [[] for _ in range(group.size())]
        dist.all_gather_object(gathered, outlines, group=group)
        return gathered

    def _outline(self, held: _Held) -> _Outline:
        match = self.match(held.name)
        shape = list(held.tensor.shape)
        if held.sharded:
            assert match.row.tp_dim is not None
            shape[match.row.tp_dim] *= self._tensor_group(match).size()
        names = (held.name,)
        if match.expert is not None:
            per_rank = (self.config.num_moe_experts or 0) // self._settings.parallel.expert
            slots = (
                self._global_expert(match.expert % per_rank, rank) for rank in range(self._settings.parallel.expert)
            )
            names = tuple(match.row.megatron.format(i=match.layer, e=slot) for slot in slots)
        return _Outline(names=names, shape=tuple(shape), dtype=held.tensor.dtype)

    def _full(self, held: _Held) -> list[Tensor]:
        """The full Megatron tensor; of an expert, that of each expert-parallel rank."""
        match = self.match(held.name)
        full = self._merged(held)
        if held.sharded:
            full = unshard(match.row, _all_gather(full, self._tensor_group(match)))
        if match.expert is None or self._settings.parallel.expert == 1:
            return [full.contiguous()]
        return _all_gather(full, ranks.expert_group())

    def _receive(self, outline: _Outline) -> list[Tensor]:
        device = next(self.chunks[0].parameters()).device
        return [torch.empty(outline.shape, dtype=outline.dtype, device=device) for _ in outline.names]


def check_context(settings: MegatronSettings) -> None:
    """Raises ValueError for rows that local attention would need quadratic memory for."""
    ranks, longest = settings.parallel.context, settings.longest_row
    if ranks > 1 and longest > LONGEST_SHARED_ROW and not layers_of(settings).engine_attention:
        raise ValueError(
            f"context_parallel_size={ranks} without Transformer Engine forms a mask of {longest} x {longest // ranks} "
            f"positions (sequence_length); at most {LONGEST_SHARED_ROW} are allowed; install "
            "transformer-engine on GPUs (the log says why transformer_impl: auto does not use it), or shorten the rows"
        )


def _carry_gradients(embedding: torch.nn.Module, inputs: object, output: Tensor) -> None:
    """Layers that are computed again pass gradients on only if their input asks for them. That of the first does not
    when the embedding is frozen (adapters, freeze_module_prefix), and then nothing would train, in silence.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _union(own: set[str]) -> set[str]:
    """What any rank found; collective."""
    gathered: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return set().union(*gathered)


def _mark_shards(module: torch.nn.Module) -> None:
    """Say which weights tensor parallelism splits, for the gradient norm: Megatron's local layers leave that to the
    initialisation, which does not happen here. Transformer Engine's layers say it themselves.
    """
    for layer in module.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            weight, dim = layer.weight, 1 if isinstance(layer, RowParallelLinear) else 0
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, True, dim, 1)


def _mark_experts(module: torch.nn.Module) -> None:
    """Tell gradient buffers that experts have data-parallel groups of their own. Megatron marks them only with expert
    parallelism; with expert_tensor_parallel_size below the tensor size, each tensor rank has other tokens for the same
    expert, and without the mark their gradients would never meet.
    """
    for name, parameter in module.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
            # Those of a bias would be summed over tensor ranks once more, and counted in the gradient norm of the first
            # of them alone, where the others may hold other experts.
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _copy_before_biases(module: torch.nn.Module) -> None:
    """Megatron adds an expert's bias in place to what its second layer gives, which on one rank is a view that autograd
    lets nobody change.
    """
    for name, layer in module.named_modules():
        if ".experts." in name and isinstance(layer, RowParallelLinear) and layer.bias is not None:
            layer.register_forward_hook(lambda _, given, output: (output[0].clone(), output[1]))


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that checkpoints hold (the routers' expert bias); not the adapters' own."""
    yield from ((name, parameter) for name, parameter in module.named_parameters() if ADAPTER not in name)
    persistent = module.state_dict().keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def _all_gather(part: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts

"""A tiny random model of every family, as transformers saves it, and what the ranks do with it."""

from contextlib import contextmanager

TINY = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1, "pad_token_id": None,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
}  # fmt: skip

# name -> (transformers class, config beyond TINY)
FAMILIES = {
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2.5 yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama 2": ("Llama", {"num_key_value_heads": 4}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral window": ("Mistral", {"sliding_window": 12}),
    "qwen2 moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}),
    "qwen3 moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "deepseek v3": ("DeepseekV3", LATENT),
    "deepseek v3 yarn": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": None, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "glm": ("Glm", {"head_dim": 16}),
    "glm 4": ("Glm4", {"head_dim": 16}),
}
MOE = ("qwen2 moe", "qwen3 moe", "mixtral", "deepseek v3", "deepseek v3 yarn")


def save_tiny(name, folder):
    """Write the family's model with non-trivial norms and biases; returns the transformers model."""
    import torch
    import transformers

    kind, more = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **more})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for part, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "bias" in part or "norm" in part:
            tensor.data.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return model.eval()


@contextmanager
def joined(rank, world_size, port, layout):
    """Settings of a role on this rank, inside the layout's process groups."""
    from roll_async.trainer.megatron import ranks
    from roll_async.trainer.megatron.settings import ParallelSizes

    parallel = ParallelSizes(**layout)
    spec = ranks.RankSpec(rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port, device="cpu")
    ranks.join(spec, parallel, 1)
    try:
        yield parallel
    finally:
        ranks.leave()


def build(folder, parallel):
    import torch

    from roll_async.trainer.megatron.model.model import HfBackedModel
    from roll_async.trainer.megatron.settings import MegatronSettings

    return HfBackedModel(
        MegatronSettings(model_folder=str(folder), dtype="fp32", parallel=parallel), torch.device("cpu")
    )


def logits_and_export(rank, world_size, port, layout, folder, tokens):
    """([B,T,V] of the whole vocabulary on the last pipeline stage, None on the others; the exported tensors)."""
    import numpy as np
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    tokens = torch.from_numpy(tokens)
    outputs = []

    def forward(iterator, chunk):
        out = chunk(tokens, torch.arange(tokens.shape[1]).expand(len(tokens), -1), None)
        return out, lambda x: (outputs.append(gather_from_tensor_model_parallel_region(x)), (x.sum(), {}))[1]

    with joined(rank, world_size, port, layout) as parallel, torch.no_grad():
        model = build(folder, parallel)
        model.train(False)
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=[iter([0])] * len(model.chunks), model=model.chunks,
            num_microbatches=1, seq_length=tokens.shape[1], micro_batch_size=len(tokens), forward_only=True,
        )  # fmt: skip
        exported = {name: tensor.numpy() for name, tensor in model.export()}
        last = parallel_state.is_pipeline_last_stage()
    # numpy: tensors would travel by file descriptor
    return (np.asarray(outputs[0]) if last else None), exported


def reshard(rank, world_size, port, layout, hf, source, target):
    """Load a converted checkpoint into a model with other weights, and save it again as a run does.

    Returns the largest difference between what was loaded and what the HF folder gives.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from roll_async.trainer.megatron.state.torch_dist import TorchDistSave

    with joined(rank, world_size, port, layout) as parallel, torch.no_grad():
        module = build(hf, parallel).module
        wanted = {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(7.0)
        module.load_state_dict(dist_checkpointing.load(module.sharded_state_dict(), str(source)), strict=False)
        difference = max((module.state_dict()[name] - wanted[name]).abs().max().item() for name in wanted)
        if rank == 0:
            target.mkdir()
        dist.barrier()
        TorchDistSave(target, {"model": module.sharded_state_dict()}, background=False).finish()
    return difference

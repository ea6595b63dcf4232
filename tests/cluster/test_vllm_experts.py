"""Mixtures of experts on vLLM's CPU build: after every update the served weights are those that were pushed. vLLM packs
experts when it loads them first and never again, so that a reload as it is serves them in the wrong order.
"""

import asyncio

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file
from test_engine_protocol import CONTEXT, EOS, PROMPT, Replica, greedy

SHARED = {"shared_expert_intermediate_size": 96, "mlp_only_layers": [1]}
CASES = {
    "as wide as the kernel's blocks": ("Qwen3Moe", {"moe_intermediate_size": 64, "norm_topk_prob": True}, {}),
    "padded by the kernel, a shared expert, a layer without": ("Qwen2Moe", {"moe_intermediate_size": 40, **SHARED}, {}),
    "Mixtral, core in a process of its own": ("Mixtral", {"num_local_experts": 4}, {"core_in_process": False}),
    "each rank's half padded": ("Qwen3Moe", {"moe_intermediate_size": 32}, {"tensor_parallel_size": 2}),
}


def maker(family, changes):
    def make(seed, tied):
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family}Config")(
            **{
                "vocab_size": 512, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32,
                "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
                "max_position_embeddings": CONTEXT, "tie_word_embeddings": tied, "eos_token_id": EOS, "pad_token_id": 0,
                "bos_token_id": None, "initializer_range": 0.1, "dtype": "float32", **changes,
            }
        )  # fmt: skip
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        model.generation_config.eos_token_id = EOS
        return model

    return make


def checkpoint(model, folder):
    """The tensors as they are pushed: one for each expert."""
    model.save_pretrained(folder)
    return list(load_file(folder / "model.safetensors").items())


@pytest.mark.parametrize("case", CASES)
def test_a_mixture_of_experts_samples_from_the_weights_of_the_last_push(case, tmp_path):
    family, changes, settings = CASES[case]
    replica = Replica(
        "vllm", tmp_path / "start", tied=False, make_model=maker(family, changes), sleep_level=2, **settings
    )

    async def serves(name):
        wanted = greedy(replica.models[name], PROMPT, 24)
        found = await replica.engine.generate(replica.request(temperature=0.0))
        assert list(found.token_ids) == wanted
        requests = [replica.request(range(40 + i, 60 + i)) for i in range(8)]
        for request, completion in zip(requests, await asyncio.gather(*replica.start(*requests)), strict=True):
            replica.assert_sampled_from(name, request, completion)

    async def go():
        await serves("old")
        for version, name in enumerate(("new", "old", "new"), start=1):
            await replica.push_tensors(checkpoint(replica.models[name], tmp_path / name), version)
            await serves(name)

    try:
        replica.runner.run(go())
    finally:
        replica.close()

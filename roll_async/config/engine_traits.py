"""What each engine library can, and how it differs from the others. Callers look here, never at a library's name or at
the type of its section; nothing here imports a library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTraits:
    """One library."""

    title: str
    """As texts name it."""
    package: str | None
    """What has to be installed for it; None = nothing beyond the project itself."""
    context_key: str | None
    """Its key for tokens of prompt and response together; None = what the run asks for."""
    kept_positions: int = 0
    """Of a model's positions, those that it keeps to itself beyond that."""
    eager_key: str | None = None
    """Its key for no CUDA graphs, which a run that is put on CPU names; None = it names none."""
    forms_batches: bool
    """It decides which requests are decoded together; else `infer_batch_size` does."""
    takes_attention: bool
    """`attn_implementation` chooses its kernel."""
    fa2_on_devices: bool = False
    """Flash attention is what it takes on devices, so that fa2 names what is there."""
    keep_in_place: bool
    """Running requests can live through a weight update (interrupt.mode keep)."""
    samples_all: bool
    """Stop strings and a repetition penalty are possible."""
    receives_parts: bool
    """Each rank receives its own part of the weights over every transport; else whole tensors come into the front end
    over those of host memory.
    """
    stages_receive: bool = True
    """Ranks of every pipeline stage answer, and so can receive their parts."""
    keys_of_other_parts: frozenset[str] = frozenset()
    """Of `strategy_config.extra`: with these its ranks hold a model otherwise than `weight_sync/layout.py` cuts it, or
    a second one.
    """
    stages_over_nodes: bool = True
    """The pipeline stages of a replica may lie on several nodes."""
    stages_on_cpu: bool = True
    max_adapter_rank: int | None = None
    """Of adapters beside pushed weights; 0 = it was never shown to compute with such, None = any."""
    records_whole: bool = True
    """It records experts of all stages, with or without a prefix cache, on CPU, too."""
    sliding_windows: bool = True
    """Rows may be longer than the window of a model."""
    unserved: Mapping[str, str] = field(default_factory=dict)
    """Families of `checkpoint/hf_names` that it cannot serve, and why."""
    unshown: str | None = None
    """Why it serves no model that reads images; None = it does."""
    cpu_head_sizes: tuple[int, ...] | None = None
    """Of heads that its attention on CPU knows; None = any."""
    block_multiples: Mapping[str, int] = field(default_factory=dict)
    """By device, of which the blocks of its KV cache must be a multiple."""


_DELTA_NETS = ("qwen3_5", "qwen3_next", "qwen3_5_moe")
"""Families with gated delta nets."""
_UNTRIED = "no run has proved pushes into its gated delta nets"

ENGINE_TRAITS = {
    "vllm": EngineTraits(
        title="vLLM",
        package="vllm",
        context_key="max_model_len",
        eager_key="enforce_eager",
        forms_batches=True,
        takes_attention=False,
        fa2_on_devices=True,
        keep_in_place=True,
        samples_all=True,
        receives_parts=True,
        stages_on_cpu=False,
        max_adapter_rank=512,
        records_whole=False,
        unserved={
            **dict.fromkeys(_DELTA_NETS, f"its model wants torchvision beside torch's CPU build; {_UNTRIED}"),
            "qwen3_next": f"on the CPU its gated delta nets are bf16 alone; {_UNTRIED}",
        },
        unshown="its processor of images wants torchvision, which does not import beside torch's CPU build",
        # vllm/v1/attention/backends/cpu_attn.py: get_supported_head_sizes
        cpu_head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        # get_supported_kernel_block_sizes there, and of all its backends for attention with heads on CUDA
        block_multiples={"cpu": 32, "cuda": 16},
    ),
    "sglang": EngineTraits(
        title="SGLang",
        package="sglang",
        context_key="context_length",
        kept_positions=2,
        forms_batches=True,
        takes_attention=False,
        keep_in_place=True,
        samples_all=True,
        receives_parts=False,
        stages_receive=False,
        keys_of_other_parts=frozenset({
            "attn_cp_size", "attn_dp_size", "dcp_size", "dp_size", "dwdp_size", "enable_dense_mlp_attn_tp",
            "enable_dp_attention", "enable_dp_lm_head", "enable_prefill_cp", "enable_shared_experts_attn_tp",
            "moe_dense_tp_size", "moe_dp_size", "shared_experts_tp_size", "speculative_algorithm",
        }),
        stages_over_nodes=False,
        max_adapter_rank=0,
        unshown="it is asked in tokens alone",
        unserved={
            "gpt_oss": "it takes the experts of a layer as one tensor, and a push has them one by one",
            **dict.fromkeys(_DELTA_NETS, _UNTRIED),
        },
    ),
    "hf_infer": EngineTraits(
        title="hf_infer",
        package=None,
        context_key=None,
        forms_batches=False,
        takes_attention=True,
        keep_in_place=False,
        samples_all=False,
        receives_parts=False,
        sliding_windows=False,
        unserved={
            "nemotron": "Transformers' layers of this family do not hand its cache to their attention",
            "gpt_oss": "its attention knows no sinks",
            **dict.fromkeys(_DELTA_NETS, "its cache holds keys and values, and no state of a gated delta net"),
        },
    ),
}  # fmt: skip
"""By strategy name."""

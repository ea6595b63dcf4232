"""What an engine replica is built from, independent of the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """One replica. Keys a backend does not have are refused when the config is loaded, not here."""

    model_folder: str
    """Hugging Face name or folder."""
    dtype: str
    """bf16, fp16 or fp32."""
    device: str
    """cpu or cuda."""
    max_model_len: int
    """Tokens of prompt and response together."""
    seed: int = 42
    attention: str = "sdpa"
    """How the hf engine attends, in the words of transformers; the other engines choose for themselves."""
    max_running: int = 128
    """Requests decoded together."""
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    memory_fraction: float = 0.9
    """Share of a GPU for weights and KV cache."""
    cpu_kv_cache_bytes: int = 128 << 20
    """KV cache of a CPU replica."""
    block_size: int | None = None
    random_weights: bool = False
    """load_format dummy: weights come with the first update."""
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    quantization: str | None = None
    stop_strings: bool = False
    """Requests may carry stop strings: a tokenizer is loaded to find them."""
    truncated_sampling: bool = False
    """top_k or top_p in use: log-probs are those of the truncated distribution."""
    record_experts: bool = False
    """Completions carry the experts their tokens went to (mixture-of-experts models only)."""
    sleep_level: int = 0
    """Deepest `Engine.sleep` the replica is prepared for; 0 = it keeps its memory, and nothing is paid for sleeping."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Handed to the library unchanged."""


TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

"""What an engine replica is built from, independent of the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roll_async.config.schema import GeneratingArguments, PipelineConfig, roles_in_turns
from roll_async.inference.seeds import replica_seed
from roll_async.weight_sync.adapters import AdapterShape, adapters_of


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpan:
    """Which part of a replica whose ranks lie on several nodes, as many on each."""

    num_nodes: int
    node_rank: int
    """0: the node whose process is the engine; the others follow it."""
    master_addr: str
    """Address of that node."""
    master_port: int


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
    """Seed of this replica, different from that of every other one (`inference/seeds.py`); below 2**32."""
    attention: str = "sdpa"
    """Attention implementation of the hf engine, as transformers names it; the other engines choose their own."""
    attention_backend: str | None = None
    """SGLang's name of its attention kernel; None = its choice."""
    max_running: int = 128
    """Requests decoded together."""
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    span: NodeSpan | None = None
    """None: all ranks lie on one node."""
    memory_fraction: float = 0.9
    """Share of a GPU for weights and KV cache."""
    core_in_process: bool = True
    """vLLM on CPU with one rank: its core shares the replica's process; False = a process of its own, as on GPUs."""
    cpu_kv_cache_bytes: int = 128 << 20
    """KV cache of a CPU replica."""
    block_size: int | None = None
    random_weights: bool = False
    """load_format dummy: the first update loads the weights."""
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
    """Deepest `Engine.sleep` the replica is prepared for; 0 = it keeps its memory, without the overhead of sleeping."""
    adapter: AdapterShape | None = None
    """Low-rank adapters that the replica holds beside its weights; None = weights come with adapters merged."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Passed to the library unchanged."""

    @classmethod
    def of(cls, config: PipelineConfig, *, replica: int, restart: int) -> EngineSettings:
        """One replica of actor_infer, as the config has it. `restart`: how often it was started before."""
        role, engine, sampled = config.actor_infer, config.actor_infer.engine, _all_generating_args(config)
        own_limit = (
            config.async_training.max_concurrent_per_server if engine.traits.forms_batches else role.infer_batch_size
        )
        return cls(
            model_folder=role.model_args.model_name_or_path,
            dtype=role.model_args.dtype,
            device="cpu" if role.device_mapping is None else "cuda",
            max_model_len=engine.context_tokens or config.longest_sequence,
            seed=replica_seed(config.seed, replica, restart),
            attention="flash_attention_2" if role.model_args.attn_implementation == "fa2" else "sdpa",
            attention_backend=engine.attention_backend,
            max_running=engine.running_limit or own_limit,
            max_num_batched_tokens=engine.batched_tokens,
            tensor_parallel_size=engine.tensor_parallel_size,
            pipeline_parallel_size=engine.pipeline_parallel_size,
            memory_fraction=engine.memory_share,
            core_in_process=engine.core_in_process,
            block_size=engine.block_size,
            random_weights=engine.load_format == "dummy",
            enforce_eager=engine.eager,
            enable_prefix_caching=engine.shares_prefixes,
            quantization=engine.quantization,
            stop_strings=any(a.stop_strings for a in sampled),
            truncated_sampling=any(a.top_k > 0 or a.top_p < 1 for a in sampled),
            record_experts=config.actor_train.router_replay,
            sleep_level=2 if roles_in_turns(config) else 0,
            adapter=adapters_of(config),
            extra=engine.extra,
        )


TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def unshown_stops(config: PipelineConfig) -> tuple[str, ...]:
    """Stop strings that are no part of an answer, of training and of validations, but for those that training shows."""
    training = config.actor_infer.generating_args
    shown = training.stop_strings if training.include_stop_str_in_output else ()
    cut = (args.stop_strings for args in _all_generating_args(config) if not args.include_stop_str_in_output)
    return tuple(dict.fromkeys(stop for stops in cut for stop in stops if stop not in shown))


def _all_generating_args(config: PipelineConfig) -> list[GeneratingArguments]:
    # An engine is started once, for training and for every validation.
    return [config.actor_infer.generating_args, *config.validation_sampling.values()]

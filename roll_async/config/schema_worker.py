"""One role: its strategy, devices, model, and what it does with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from roll_async.config.engine_traits import ENGINE_TRAITS, EngineTraits
from roll_async.config.fields import bounded, chosen, derived, option, required, section

TRAINED_ROLES = ("actor_train", "critic")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArguments:
    """Which weights, and in which form."""

    model_name_or_path: str = derived()
    """HF name or folder; default: pretrain (critic: reward_pretrain)."""
    dtype: Literal["bf16", "fp16", "fp32"] = derived()
    """Number format of weights and activations; bf16 needs no loss scaling. Default: bf16; fp32 for a run on CPUs
    without instructions for bf16."""
    attn_implementation: Literal["auto", "sdpa", "fa2"] = "auto"
    """Kernel of hf_infer (fa2 = flash attention, auto = sdpa), and fa2 of Transformer Engine; other strategies choose
    for themselves."""
    disable_gradient_checkpointing: bool = False
    """true refuses a recompute_granularity; no effect on inference roles."""
    lora_rank: int = bounded(0, ">= 0")
    """Rank of the low-rank adapters; 0 = full training."""
    lora_alpha: float | None = derived("> 0")
    """Scale of the adapters; default: 2 * lora_rank, null while the rank is 0."""
    lora_dropout: float = bounded(0.0, "in [0, 1)")
    """Dropout in front of the adapters; 0, because RL needs equal log-probs on both sides."""
    lora_target: tuple[str, ...] = section(lambda: ("all-linear",))
    """Modules that get adapters."""
    freeze_module_prefix: tuple[str, ...] = section(tuple)
    """Parameters whose name starts with one of these do not train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingArguments:
    """Optimizer and batch shape of a trained role."""

    learning_rate: float = bounded(1e-6, "> 0")
    """Peak learning rate; 1e-6 is the common value for RL on pretrained models."""
    weight_decay: float = bounded(0.0, ">= 0")
    """Decoupled weight decay; 0, because RL runs are short."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape over max_steps; of an actor without the steps of critic_warmup."""
    warmup_steps: int = bounded(0, ">= 0")
    """Optimizer steps of linear warm-up."""
    adam_beta1: float = bounded(0.9, "in [0, 1)")
    """Decay of the first moment."""
    adam_beta2: float = bounded(0.999, "in [0, 1)")
    """Decay of the second moment."""
    adam_epsilon: float = bounded(1e-8, "> 0")
    """Added to the root of the second moment."""
    max_grad_norm: float = bounded(1.0, "> 0")
    """Gradients are scaled down to this norm."""
    per_device_train_batch_size: int = bounded(1, ">= 1")
    """Rows per micro-batch per data-parallel rank."""
    gradient_accumulation_steps: int = bounded(1, ">= 1")
    """Micro-batches per optimizer step; samples of a step / (per_device_train_batch_size * data parallel) = one
    optimizer step, which is what the shipped configs take. 1 with a large batch is a warning (W15)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratingArguments:
    """How tokens are sampled."""

    max_new_tokens: int = derived(">= 1")
    """Tokens per request (agentic: per turn); default: response_length, agentic 512."""
    temperature: float = bounded(1.0, "0 or in [0.0001, 10000]")
    """0 = greedy, for validation only."""
    top_p: float = bounded(1.0, "in (0, 1]")
    """Share of probability mass sampled from; 1 = all, so that behaviour log-probs are those of the model."""
    top_k: int = bounded(-1, "-1 or >= 1")
    """Tokens sampled from; -1 = all."""
    num_beams: int = bounded(1, "1")
    """No beam search."""
    num_return_sequences: int = derived(">= 1")
    """Responses per prompt; follows from num_return_sequences_in_group (agentic: 1)."""
    repetition_penalty: float = bounded(1.0, "> 0")
    """1 = off; anything else makes the sampled distribution differ from the trained one."""
    stop_strings: tuple[str, ...] = section(tuple)
    """Generation ends at the first of these."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the response."""
    logprobs: bool = True
    """Return the behaviour log-prob of each token; off-policy corrections need it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataArguments:
    """Prompt files and their columns."""

    file_name: tuple[str, ...] = required(form="files")
    """Paths, one or a list; json, jsonl or parquet by suffix."""
    template: Literal["native", "qwen2_5", "qwen3", "chatml", "base"] = "native"
    """Chat template; native = the tokenizer's own."""
    template_kwargs: Mapping[str, object] = derived()
    """Variables that the chat template reads, as `{enable_thinking: false}` (`date_string`, `reasoning_effort`, ...);
    default: none, in a validation with the same template those of actor_train. Agents have them, too: in agentic
    configs this key stands alone in `actor_train.data_args`."""
    messages: str | None = derived()
    """Column with chat turns; default: messages, unless `prompt` names a column."""
    prompt: str | None = None
    """Column with plain text; not together with messages."""
    id: str = "id"
    """Column with the row's id."""
    tag: str = "tag"
    """Column with the data set's tag, which picks the reward domain."""
    ground_truth: str = "ground_truth"
    """Column with the reference answer."""
    domain_interleave_probs: Mapping[str, float] | None = option(None, range="in [0, 1]", form="names")
    """Share of each domain, sum 1; null = by size."""
    preprocessing_num_workers: int = bounded(1, ">= 1")
    """Processes that tokenise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronConfig:
    """What both Megatron strategies have."""

    tensor_model_parallel_size: int = bounded(1, ">= 1")
    """Ranks that split each layer."""
    pipeline_model_parallel_size: int = bounded(1, ">= 1")
    """Ranks that split the layers."""
    context_parallel_size: int = bounded(1, ">= 1")
    """Ranks that split the sequence."""
    expert_model_parallel_size: int = bounded(1, ">= 1")
    """Ranks that split the experts."""
    expert_tensor_parallel_size: int = bounded(1, ">= 1")
    """Ranks that split each expert."""
    sequence_parallel: bool = False
    """Split activations outside attention along the sequence, over the tensor ranks."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach their experts."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layer implementation; auto = Transformer Engine where it is installed and a GPU is used."""
    extra: Mapping[str, object] = section(dict)
    """Handed to Megatron-Core unchanged and unchecked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronInferConfig(MegatronConfig):
    """megatron_infer: Megatron ranks that only score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronTrainConfig(MegatronConfig):
    """megatron_train: Megatron ranks that train."""

    virtual_pipeline_model_parallel_size: int | None = bounded(None, ">= 1")
    """Chunks of layers per pipeline rank, null = one; more chunks, smaller bubble."""
    use_distributed_optimizer: bool = True
    """Shard optimizer states over the data-parallel ranks; same result, less memory."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool = False
    """Gather parameters while the forward pass runs."""
    optimizer_cpu_offload: bool = False
    """Keep optimizer states in host memory."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, attention only, null = store them."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Which layers are recomputed (full only)."""
    recompute_num_layers: int = bounded(1, ">= 1")
    """Layers per recomputed chunk (full only)."""
    moe_aux_loss_coeff: float = bounded(0.0, ">= 0")
    """Load-balancing loss; 0, because RL should not move the router for balance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """What vllm and sglang have: one engine per tensor_parallel_size * pipeline_parallel_size devices."""

    tensor_parallel_size: int = bounded(1, ">= 1")
    """Devices that split each layer."""
    pipeline_parallel_size: int = bounded(1, ">= 1")
    """Devices that split the layers."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy = random weights until the first weight sync, which precedes generation."""
    quantization: Literal["fp8"] | None = None
    """Number format of the engine's weights, null = as loaded."""
    extra: Mapping[str, object] = section(dict)
    """Handed to the library unchanged and unchecked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmConfig(ServerConfig):
    """vllm: one engine per tensor_parallel_size * pipeline_parallel_size devices."""

    gpu_memory_utilization: float = bounded(0.9, "in (0, 1]")
    """Share of device memory for weights and KV cache; vLLM's own default."""
    block_size: Literal[8, 16, 32, 64, 128] | None = None
    """Tokens per KV cache block, null = vLLM's choice."""
    max_model_len: int = derived(">= 1")
    """Tokens of prompt and response together; default: sequence_length."""
    max_num_seqs: int | None = bounded(None, ">= 1")
    """Sequences in one engine step, null = vLLM's choice."""
    max_num_batched_tokens: int | None = bounded(None, ">= 1")
    """Tokens in one engine step, null = vLLM's choice."""
    enforce_eager: bool = derived()
    """true turns compilation and CUDA graphs off; default: true where max_steps is at most 10, else false. A CPU engine
    has none, and nothing in their place."""
    enable_prefix_caching: bool = True
    """Share the prompt's KV cache among the samples of a group."""
    core_in_process: bool = True
    """On CPU and with one device per engine: vLLM's core shares the replica's process; false = a process of its own."""

    traits: ClassVar[EngineTraits] = ENGINE_TRAITS["vllm"]
    attention_backend: ClassVar[None] = None

    # What other libraries name otherwise, by one name; the same in each of the sections below.

    @property
    def context_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return self.max_model_len

    @property
    def memory_share(self) -> float:
        """Share of device memory for weights and KV cache."""
        return self.gpu_memory_utilization

    @property
    def running_limit(self) -> int | None:
        """Requests in one engine step."""
        return self.max_num_seqs

    @property
    def batched_tokens(self) -> int | None:
        """Tokens in one engine step."""
        return self.max_num_batched_tokens

    @property
    def eager(self) -> bool:
        """No CUDA graphs."""
        return bool(self.enforce_eager)

    @property
    def shares_prefixes(self) -> bool:
        """Requests share the KV cache of equal beginnings."""
        return self.enable_prefix_caching


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangConfig(ServerConfig):
    """sglang: one engine per tensor_parallel_size * pipeline_parallel_size devices."""

    mem_fraction_static: float = bounded(0.85, "in (0, 1)")
    """Share of device memory for weights and KV cache."""
    context_length: int = derived(">= 1")
    """Tokens of prompt and response together; default: sequence_length."""
    max_running_requests: int | None = bounded(None, ">= 1")
    """Requests in one engine step, null = SGLang's choice."""
    chunked_prefill_size: int | None = bounded(None, ">= 1")
    """Tokens of one prefill chunk, null = SGLang's choice."""
    disable_cuda_graph: bool = False
    """true turns CUDA graphs off. A CPU engine has none."""
    disable_radix_cache: bool = False
    """Do not share prompt prefixes."""
    attention_backend: str | None = None
    """Attention kernel by SGLang's name, null = its choice."""

    traits: ClassVar[EngineTraits] = ENGINE_TRAITS["sglang"]
    block_size: ClassVar[None] = None
    core_in_process: ClassVar[bool] = False

    @property
    def context_tokens(self) -> int:
        return self.context_length

    @property
    def memory_share(self) -> float:
        return self.mem_fraction_static

    @property
    def running_limit(self) -> int | None:
        return self.max_running_requests

    @property
    def batched_tokens(self) -> int | None:
        return self.chunked_prefill_size

    @property
    def eager(self) -> bool:
        return self.disable_cuda_graph

    @property
    def shares_prefixes(self) -> bool:
        return not self.disable_radix_cache


@dataclass(frozen=True, kw_only=True, slots=True)
class HfInferConfig:
    """hf_infer: transformers in this process; needs nothing else."""

    extra: Mapping[str, object] = section(dict)
    """Handed to transformers unchanged and unchecked."""

    # It has no keys for these: it is one process on one device, with the context that the run asks for.
    traits: ClassVar[EngineTraits] = ENGINE_TRAITS["hf_infer"]
    tensor_parallel_size: ClassVar[int] = 1
    pipeline_parallel_size: ClassVar[int] = 1
    load_format: ClassVar[str] = "auto"
    quantization: ClassVar[None] = None
    block_size: ClassVar[None] = None
    attention_backend: ClassVar[None] = None
    core_in_process: ClassVar[bool] = False
    context_tokens: ClassVar[None] = None
    memory_share: ClassVar[float] = 1.0
    running_limit: ClassVar[None] = None
    batched_tokens: ClassVar[None] = None
    eager: ClassVar[bool] = True
    shares_prefixes: ClassVar[bool] = False


EngineConfig = VllmConfig | SglangConfig | HfInferConfig
StrategyConfig = MegatronTrainConfig | MegatronInferConfig | EngineConfig

STRATEGIES: dict[str, type] = {
    "megatron_train": MegatronTrainConfig,
    "megatron_infer": MegatronInferConfig,
    "vllm": VllmConfig,
    "sglang": SglangConfig,
    "hf_infer": HfInferConfig,
}
STRATEGY_ROLES: dict[str, tuple[str, ...]] = {
    "megatron_train": ("actor_train", "critic"),
    "megatron_infer": ("reference", "teacher"),
    "vllm": ("actor_infer",),
    "sglang": ("actor_infer",),
    "hf_infer": ("actor_infer", "reference", "teacher"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyArguments:
    """The library behind a role."""

    strategy_name: Literal["megatron_train", "megatron_infer", "vllm", "sglang", "hf_infer"] = required()
    """Picks the class of strategy_config."""
    strategy_config: StrategyConfig = chosen("strategy_name")
    """Settings of that library."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """One role.

    Worked example: 16 devices, tensor 2, pipeline 1, context 1: data_parallel_size 8; with 1 row per micro-batch and 64
    micro-batches per optimizer step, mini_batch_size is 512 samples.
    """

    strategy_args: StrategyArguments = required()
    """Library and its settings."""
    device_mapping: tuple[int, ...] | None = option(None, form="devices")
    """Device ids over all nodes, one process each; null = CPU processes."""
    world_size: int = derived(">= 1")
    """Processes; 1 on CPU, else the number of devices."""
    model_args: ModelArguments = section(ModelArguments)
    """Model and its number format."""
    training_args: TrainingArguments = section(TrainingArguments, roles=TRAINED_ROLES)
    """Optimizer and batch shape."""
    data_args: DataArguments | None = option(None, roles=("actor_train",))
    """Prompt files; required for rlvr."""
    generating_args: GeneratingArguments = section(GeneratingArguments, roles=("actor_infer",))
    """Sampling."""
    infer_batch_size: int = bounded(16, ">= 1")
    """Rows per forward pass when scoring given tokens; vLLM and SGLang batch generation themselves."""
    micro_batching: Literal["fixed", "dynamic", "packed"] = option("fixed", megatron=True)
    """fixed: rows padded to sequence_length; dynamic: grouped by length; packed: no padding."""
    max_tokens_per_microbatch: int | None = option(None, megatron=True, range=">= 1")
    """Tokens of one micro-batch; required for dynamic and packed."""
    logits_in_fp32: bool = option(True, megatron=True)
    """Log-probs from fp32 logits; always so, bf16 logits would cost about 1e-2 in log-prob."""
    router_replay: bool = option(False, roles=("actor_train",), megatron=True)
    """Replay the engine's expert choice in training (MoE)."""
    system_envs: Mapping[str, str] = section(dict, form="names")
    """Environment of this role's processes, added to the top-level one."""

    @property
    def num_ranks(self) -> int:
        """Processes of the role: devices, or world_size on CPU."""
        return self.world_size if self.device_mapping is None else len(self.device_mapping)

    @property
    def is_megatron(self) -> bool:
        """Whether Megatron-Core runs the role."""
        return isinstance(self.strategy_args.strategy_config, MegatronConfig)

    @property
    def engine(self) -> EngineConfig:
        """Settings of the engine library of a role that Megatron-Core does not run, as actor_infer."""
        strategy = self.strategy_args.strategy_config
        assert not isinstance(strategy, MegatronConfig), "a Megatron role has no engine"
        return strategy

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        s = self.strategy_args.strategy_config
        if isinstance(s, MegatronConfig):
            return s.tensor_model_parallel_size * s.pipeline_model_parallel_size * s.context_parallel_size
        return s.tensor_parallel_size * s.pipeline_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model among the Megatron ranks, num_ranks / (tensor * pipeline * context), at least 1."""
        return max(1, self.num_ranks // self.model_parallel_size)

    @property
    def mini_batch_size(self) -> int:
        """Samples of one optimizer step."""
        t = self.training_args
        return t.per_device_train_batch_size * t.gradient_accumulation_steps * self.data_parallel_size

    @property
    def num_servers(self) -> int:
        """Engine replicas. On CPU every process is one."""
        if self.device_mapping is None:
            return self.world_size
        return max(1, len(self.device_mapping) // self.model_parallel_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherServer:
    """A teacher behind an OpenAI-compatible address, which scores each answer as soon as it is complete."""

    address: str = required()
    """http://HOST:PORT/v1 of a server whose /completions gives the log-probs of a prompt (`echo`), as vLLM's does."""
    model: str = required()
    """Name of the model there."""
    api_key_env: str | None = None
    """Name of the environment variable with the key; null = none."""
    timeout: float = bounded(120.0, "> 0")
    """Seconds of one request."""
    max_concurrent: int = bounded(32, ">= 1")
    """Requests at the same time."""
    max_retries: int = bounded(3, ">= 0")
    """Further attempts of a request that the server is too busy for; after them it is an outage, which the rollout
    waits out."""

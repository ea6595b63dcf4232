"""How SGLang is started: its environment and its arguments, from the settings of a replica."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from roll_async.config.versions import refuse_unknown_release
from roll_async.inference.backends import SGLANG_ON_CPU
from roll_async.inference.settings import TORCH_DTYPES, EngineSettings
from roll_async.inference.sleeping import drop_expandable_segments

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RANK_LOADER = "roll_async.inference.sglang.rank.obey"
"""By this name each rank finds what loads weights there."""
_STAND_INS = str(Path(__file__).parent / "stand_ins")
"""Modules that SGLang imports, and that are not to be had for a CPU or not needed for text."""
CPU_STREAM_INTERVAL, GPU_STREAM_INTERVAL = 16, 32
"""Tokens of a request between two messages of the scheduler: what is told of a running one lies no further back."""


def prepare_environment(settings: EngineSettings) -> None:
    """Set what SGLang reads at import. Call it in the engine's process before anything imports sglang."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # names were resolved to folders before any role starts
    # The length it is told is two more than any request of ours has, which may be more than the model has.
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if settings.device == "cpu":
        # torch built for CUDA brings NCCL, which SGLang's ranks take wherever it loads, and which has no device here.
        no_nccl = "/dev/null"
        os.environ.update(SGLANG_USE_CPU_ENGINE="1", TORCHDYNAMO_DISABLE="1", SGLANG_NCCL_SO_PATH=no_nccl)
        # At the end, where what is installed comes first. SGLang's processes are spawned, with this path for theirs.
        sys.path += [folder for folder in (SGLANG_ON_CPU, _STAND_INS) if folder not in sys.path]
        refuse_unknown_release("sglang")  # of that folder: nobody could find it before
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
        # Without it one rank a socket. A list for another number of ranks is that of an engine which this process, or
        # the one that started it, had before: SGLang's ranks would die at their start.
        if len(os.environ.get("SGLANG_CPU_OMP_THREADS_BIND", "").split("|")) != ranks or ranks == 1:
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * ranks)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # where cores are shared, waiting for a second thread costs more
        return
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # what Megatron needs serialises an engine's streams
    if settings.sleep_level:
        drop_expandable_segments()


def kv_bytes_per_token(text_config: PretrainedConfig, dtype: str) -> int:
    """What a token takes in the KV cache, in all ranks together."""
    import torch

    head = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    size = getattr(torch, TORCH_DTYPES[dtype]).itemsize
    return text_config.num_hidden_layers * 2 * text_config.num_key_value_heads * head * size


def engine_arguments(settings: EngineSettings, text_config: PretrainedConfig) -> dict[str, object]:
    """Of `sglang.Engine`. Raises ValueError for an `extra` that repeats another key."""
    arguments: dict[str, object] = {
        "model_path": settings.model_folder,
        "dtype": TORCH_DTYPES[settings.dtype],
        "device": settings.device,
        "context_length": settings.max_model_len + 2,  # it keeps two positions to itself
        "max_running_requests": settings.max_running,
        "random_seed": settings.seed,
        "load_format": "dummy" if settings.random_weights else "auto",
        "tp_size": settings.tensor_parallel_size,
        "pp_size": settings.pipeline_parallel_size,
        "quantization": settings.quantization,
        "disable_radix_cache": not settings.enable_prefix_caching,
        "disable_cuda_graph": settings.enforce_eager or settings.device == "cpu",
        "chunked_prefill_size": settings.max_num_batched_tokens,
        "attention_backend": settings.attention_backend,
        "skip_tokenizer_init": not settings.stop_strings,
        "skip_server_warmup": True,
        "grammar_backend": "none",
        "sampling_mask_max_tokens": text_config.vocab_size,  # top_p alone may leave every token
        "stream_interval": CPU_STREAM_INTERVAL if settings.device == "cpu" else GPU_STREAM_INTERVAL,
        "weight_version": "0",  # label of tokens before the first commit
        "custom_weight_loader": [RANK_LOADER],
        "log_level": "error",
    }
    if settings.span is not None:
        span = settings.span
        arguments |= {"nnodes": span.num_nodes, "node_rank": span.node_rank}
        host = f"[{span.master_addr}]" if ":" in span.master_addr else span.master_addr  # IPv6
        arguments |= {"dist_init_addr": f"{host}:{span.master_port}"}
    if settings.record_experts:
        arguments["enable_return_routed_experts"] = True
    if settings.block_size is not None:
        arguments["page_size"] = settings.block_size
    if settings.device == "cpu":
        arguments |= {
            "attention_backend": settings.attention_backend or "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "sleep_on_idle": True,  # its scheduler would spin on a core that others need
            "max_total_tokens": max(
                settings.max_model_len + 2,
                settings.cpu_kv_cache_bytes // kv_bytes_per_token(text_config, settings.dtype),
            ),
        }
    else:
        arguments["mem_fraction_static"] = settings.memory_fraction
        if settings.sleep_level:
            arguments["enable_memory_saver"] = True
            arguments["enable_weights_cpu_backup"] = settings.sleep_level == 1
    twice = sorted(arguments.keys() & settings.extra.keys())
    if twice:
        raise ValueError(f"strategy_config.extra repeats what other keys decide: {', '.join(twice)}; remove it")
    # None = SGLang's own default, which need not be None.
    return {**{k: v for k, v in arguments.items() if v is not None}, **settings.extra}


def leave_failures_to_the_start(signum: int, frame: object) -> None:
    """Signal handler that does nothing. SGLang's processes report a failure by SIGQUIT, and its own handler would kill
    the process that started it. The start waits for them and raises the error; later it is the loss of the replica.
    """

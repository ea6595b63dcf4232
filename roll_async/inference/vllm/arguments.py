"""How vLLM is started: its environment and its arguments, from the settings of a replica."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from roll_async.checkpoint.folders.hf_folder import HfFolder
from roll_async.config.engine_traits import ENGINE_TRAITS
from roll_async.inference.backends import refuse_attention_on_cpu
from roll_async.inference.processes import own_children
from roll_async.inference.settings import TORCH_DTYPES, EngineSettings
from roll_async.inference.sleeping import drop_expandable_segments

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

# What vLLM takes for max_lora_rank.
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def prepare_environment(settings: EngineSettings) -> None:
    """Set what vLLM and CUDA read at import. Call it in the engine's process before anything imports vllm."""
    own_children()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # names were resolved to folders before any role starts
    os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    if settings.device == "cpu":
        # Without it the first token waits 20 s for the inductor; `uni` keeps the worker in the engine's process.
        os.environ.update(TORCHDYNAMO_DISABLE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_TARGET_DEVICE="cpu")
        # Bound to cores, ranks would each want a NUMA node of their own.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # where cores are shared, waiting for a second thread costs more
        return
    # What Megatron needs for its overlaps serialises an engine's streams.
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if settings.sleep_level:
        drop_expandable_segments()


def in_this_process(settings: EngineSettings) -> bool:
    """Whether vLLM's core shares the replica's process; see `vllm_in_process.py`."""
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    return settings.core_in_process and settings.device == "cpu" and ranks == 1


def engine_arguments(settings: EngineSettings) -> AsyncEngineArgs:
    """Raises ValueError for an `extra` that vLLM does not know or that repeats another key."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    if settings.device == "cpu":
        _check_attention(settings.model_folder)
        _check_span(settings)
    arguments = _arguments(settings)
    twice = sorted(arguments.keys() & settings.extra.keys())
    if twice:
        raise ValueError(f"strategy_config.extra repeats what other keys decide: {', '.join(twice)}; remove it")
    try:
        return AsyncEngineArgs(**arguments, **settings.extra)  # type: ignore[arg-type]
    except TypeError as error:
        where = "strategy_config.extra" + (" or actor_train.router_replay" if settings.record_experts else "")
        raise ValueError(f"{where}: {error}") from error


def _check_attention(model_folder: str) -> None:
    """Raises ValueError for a model whose attention vLLM's CPU build lacks."""
    refuse_attention_on_cpu(HfFolder(model_folder).config, ENGINE_TRAITS["vllm"])


def _check_span(settings: EngineSettings) -> None:
    """Raises ValueError for more than one rank on each of several nodes: vLLM's CPU build counts one device on a node,
    and so looks for the second rank on another one.
    """
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    if settings.span is not None and ranks != settings.span.num_nodes:
        raise ValueError(
            f"{ranks} ranks of one replica on {settings.span.num_nodes} nodes: on CPU vLLM spans nodes with one rank "
            "on each"
        )


def _arguments(settings: EngineSettings) -> dict[str, object]:
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    arguments: dict[str, object] = {
        "model": settings.model_folder,
        "dtype": TORCH_DTYPES[settings.dtype],
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_running,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "seed": settings.seed,
        "load_format": "dummy" if settings.random_weights else "auto",
        "enforce_eager": settings.enforce_eager or settings.device == "cpu",
        "enable_prefix_caching": settings.enable_prefix_caching,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        # Left alone it takes Ray inside a placement group and refuses that group's bundles.
        "distributed_executor_backend": "mp" if ranks > 1 else "uni",
        "quantization": settings.quantization,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "skip_tokenizer_init": not settings.stop_strings,
        "disable_log_stats": True,  # `load.py` reads what is needed, at less cost a step
        "worker_extension_cls": "roll_async.inference.vllm.worker_extension.WeightUpdateExtension",
    }
    if settings.span is not None:
        span = settings.span
        arguments |= {"nnodes": span.num_nodes, "node_rank": span.node_rank}
        arguments |= {"master_addr": span.master_addr, "master_port": span.master_port}
    if settings.adapter is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(rank for rank in _ADAPTER_RANKS if rank >= settings.adapter.rank),
            "lora_target_modules": list(settings.adapter.layers),
        }
    if settings.record_experts:
        arguments["enable_return_routed_experts"] = True
    if settings.block_size is not None:
        arguments["block_size"] = settings.block_size
    if settings.device == "cpu":
        arguments["kv_cache_memory_bytes"] = settings.cpu_kv_cache_bytes
    else:
        arguments["gpu_memory_utilization"] = settings.memory_fraction
        if settings.sleep_level:
            arguments["enable_sleep_mode"] = True
    return arguments

"""How long vLLM's model rests for the tensors of a push: looked up by vLLM, and written to the places known from the
push before. By turns in one process, on CPU.

    python tools/bench/reload.py [--rounds 12] [--only dense|experts] [--num-experts 64]

Two random models: one of 5.7 M parameters, one whose four layers have `--num-experts` experts each. A line has the
median and the range in milliseconds, and what that is for one tensor. `first`: the push that is looked up and noted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
SHARED = {"vocab_size": 512, "max_position_embeddings": 256, "eos_token_id": None, "dtype": "float32"}


def save_model(kind: str, num_experts: int, folder: str) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "dense":
        sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 8}
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(num_key_value_heads=2, **sizes, **SHARED))
    else:
        sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
        experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "num_key_value_heads": 1, "head_dim": 32}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts, **SHARED))
    model.save_pretrained(folder)


def measure(kind: str, args: argparse.Namespace) -> None:
    from safetensors.torch import load_file
    from vllm import LLM
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

    from roll_async.inference.vllm.packed import pack, unpack
    from roll_async.inference.vllm.reload import Reload

    with tempfile.TemporaryDirectory() as folder:
        save_model(kind, args.num_experts, folder)
        tensors = load_file(f"{folder}/model.safetensors")
        llm = LLM(
            model=folder, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=8, load_format="dummy",
            kv_cache_memory_bytes=16 << 20, distributed_executor_backend="uni", skip_tokenizer_init=True,
        )  # fmt: skip
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    model, config = worker.model_runner.get_model(), worker.vllm_config
    reload = Reload(model, config)

    def looked_up(given: dict[str, Tensor]) -> None:
        with set_current_vllm_config(config):
            unpack(model)
            initialize_layerwise_reload(model)
            model.load_weights(iter(given.items()))
            finalize_layerwise_reload(model, config.model_config)
            pack(model)

    def known(given: dict[str, Tensor]) -> None:
        reload.open()
        reload.load(given.items())
        assert reload.close() == []

    def took_ms(load: Callable[[dict[str, Tensor]], None], given: dict[str, Tensor]) -> float:
        began = time.perf_counter()
        load(given)
        return (time.perf_counter() - began) * 1e3

    took = {"first": [took_ms(known, tensors)], "looked up": [], "known places": []}
    assert reload.places_known
    for _ in range(args.rounds):
        took["looked up"].append(took_ms(looked_up, tensors))
        took["known places"].append(took_ms(known, tensors))
    for name, values in took.items():
        median = statistics.median(values)
        line = {"name": f"{kind}, {len(tensors)} tensors: {name}", "value": round(median, 1), "unit": "ms"}
        line |= {
            "range": [round(min(values), 1), round(max(values), 1)],
            "us_per_tensor": round(median / len(tensors) * 1e3),
        }
        print(json.dumps(line), flush=True)
    ratio = statistics.median(took["looked up"]) / statistics.median(took["known places"])
    print(
        json.dumps({"name": f"{kind}: looked up / known places", "value": round(ratio, 2), "unit": "ratio"}), flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", choices=("dense", "experts"))
    parser.add_argument("--num-experts", type=int, default=64)
    parser.add_argument("--here", action="store_true", help="measure --only in this process")
    args = parser.parse_args()
    if args.here:
        os.environ.update(ENVIRONMENT)
        measure(args.only, args)
        return
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    for kind in (args.only,) if args.only else ("dense", "experts"):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", kind, "--here"]
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
        print(
            "".join(line for line in output.splitlines(keepends=True) if line.startswith('{"name"')), end="", flush=True
        )


if __name__ == "__main__":
    main()

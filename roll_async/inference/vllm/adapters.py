"""The one low-rank adapter of a replica in vLLM's manager of adapters, given as tensors and without a file.

Every request names it from the start, when it is zero, and it never leaves its slot: vLLM would look for its file. A
push takes the place of its tensors, under the same name; vLLM's key of a cached prefix has that name and no version, so
the cache is emptied as with any push.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roll_async.checkpoint.lora_targets import ADAPTER_HALVES, adapter_half

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.request import LoRARequest

_ID = 1


def adapter_request() -> LoRARequest:
    """What a request of vLLM carries to be computed with the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="policy", lora_int_id=_ID, lora_path="in memory")


def set_adapter(manager: LoRAModelManager, tensors: Mapping[str, Tensor] | None) -> None:
    """Serve these halves, named as in a push; None = an adapter of zeros. Each tensor-parallel rank is given whole ones
    and cuts its own. Raises RuntimeError, and changes nothing, unless they are those of every layer that vLLM prepared.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.peft_helper import PEFTHelper

    wanted = {adapter_half(f"{layer}.weight", half) for layer in _layers(manager) for half in ADAPTER_HALVES}
    if tensors is not None and (differing := sorted(wanted ^ tensors.keys())):
        where = "did not come" if differing[0] in wanted else "belongs to no layer with an adapter"
        raise RuntimeError(f"the adapter is incomplete: {differing[0]} {where}")
    tensors = tensors or {}
    rank = next((len(tensor) for name, tensor in tensors.items() if ADAPTER_HALVES[0] in name), 1)
    # Its scale is in B, so alpha / r is 1.
    form = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    device, dtype = str(manager.device), manager.lora_config.lora_dtype
    adapter = LoRAModel.from_lora_tensors(_ID, dict(tensors), form, device=device, dtype=dtype)  # type: ignore[arg-type]
    if not adapter.loras:  # vLLM wants one; every layer of the model that has none adds nothing
        nothing = torch.zeros(1, 1, device=device)
        adapter.loras["none"] = LoRALayerWeights("none", 1, 1, nothing, nothing)
    manager.remove_adapter(_ID)  # vLLM would keep the tensors of an adapter whose id it has
    manager.add_adapter(adapter)
    manager.activate_adapter(_ID)


def _layers(manager: LoRAModelManager) -> list[str]:
    """Layers with an adapter under their names in checkpoints: vLLM computes q, k and v as one, and gate and up."""
    found = []
    for name in manager.modules:
        path, _, last = name.rpartition(".")
        found += [f"{path}.{part}" for part in manager.packed_modules_mapping.get(last, [last])]
    return found

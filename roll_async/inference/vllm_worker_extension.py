"""Runs inside vLLM's worker process: loads buckets into the live model. Imported by name (`worker_extension_cls`)."""

from __future__ import annotations

import pickle

import torch
from torch import nn

if not torch.cuda.is_available():
    # vLLM's AMX attention kernels run without asking the kernel for permission to use AMX tiles and die with SIGILL.
    torch.cpu._init_amx()

from roll_async.weight_sync.bucket import Bucket, UpdatePlan
from roll_async.weight_sync.digest import Digest
from roll_async.weight_sync.transports import RECEIVERS


class WeightUpdateExtension:
    """Mixed into vLLM's worker; `model_runner` is the worker's."""

    def roll_begin_update(self, transport: str, verify: str) -> None:
        """Open the model for new weights; an update left unfinished is given up."""
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        self._roll_plan = UpdatePlan(version=0, transport=transport, verify=verify)
        self._roll_digest = Digest(verify)
        initialize_layerwise_reload(self._roll_model)

    def roll_load_bucket(self, pickled: bytes) -> None:
        """Load one `Bucket` (vLLM's own encoding would lose its type). Tensors are copied: a layer is assembled when
        all its parts have come.
        """
        bucket: Bucket = pickle.loads(pickled)
        device = self.model_runner.device  # type: ignore[attr-defined]
        tensors = []
        for slot, raw, tensor in RECEIVERS[self._roll_plan.transport](bucket):
            self._roll_digest.update(slot, raw)
            tensors.append((slot.name, tensor.to(device, copy=True)))
        self._roll_model.load_weights(tensors)

    def roll_finish_update(self) -> str:
        """Make the new weights the served ones; returns the digest of what was loaded."""
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        finalize_layerwise_reload(self._roll_model, self.model_runner.model_config)  # type: ignore[attr-defined]
        self._roll_repack_tied_head()
        return self._roll_digest.hexdigest()

    def _roll_repack_tied_head(self) -> None:
        """A tied output layer gets no tensor of its own, so vLLM's reload leaves its packed CPU copy at the old
        weights.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self._roll_model.modules():
            if isinstance(module, ParallelLMHead) and not module.weight.is_cuda:
                module.quant_method.process_weights_after_loading(module)

    @property
    def _roll_model(self) -> nn.Module:
        return self.model_runner.get_model()  # type: ignore[attr-defined]

"""Runs inside vLLM's worker (`worker_extension_cls`): takes weight buckets in and swaps them into the live model.

Staged transports: tensors wait in host memory, mapped and not copied; the served model is untouched until
`roll_commit`. Device transports: there is no room for a second model, so buckets go into the live one as they come;
the engine is paused.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    # vLLM's AMX attention kernels run without asking the kernel for permission to use AMX tiles and die with SIGILL.
    torch.cpu._init_amx()

from roll_async.inference.processes import end_with_owner
from roll_async.inference.sleeping import KV_CACHE, WEIGHTS
from roll_async.inference.storages import Storages
from roll_async.inference.vllm.adapters import set_adapter
from roll_async.inference.vllm.packed import packed_bytes
from roll_async.inference.vllm.reload import Reload
from roll_async.weight_sync.bucket import STAGED, Content, UpdatePlan, is_adapter
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.transfer import Receiver, open_receiver

end_with_owner()


class WeightUpdateExtension:
    """Mixed into vLLM's worker; `model_runner` is the worker's."""

    # All names have a prefix: vLLM refuses an extension with a name that its worker has.
    _roll_receiver: Receiver | None = None
    _roll_kept: LastExport | None = None
    _roll_reloading: Reload | None = None
    _roll_kv_storages: Storages | None = None
    _roll_weights: Storages | None = None
    _roll_content = Content.MERGED
    _roll_halves: dict[str, Tensor]
    """Halves of adapters that were taken in, of the update under way."""

    def roll_call(self, method: str, *args: object) -> tuple[object, str]:
        """(result, error) of a method below: vLLM would turn its exception into one without a type."""
        try:
            return getattr(self, method)(*args), ""
        except (RuntimeError, ValueError, OSError, LookupError, AssertionError) as error:
            return None, f"{type(error).__name__}: {error}"

    def roll_begin_update(self, pickled: bytes) -> None:
        """Expect the version of an `UpdatePlan` (pickled: vLLM's own encoding would lose its type); one left unfinished
        is given up.
        """
        self._roll_give_up()
        plan: UpdatePlan = pickle.loads(pickled)
        self._roll_content, self._roll_halves = plan.content, {}
        size = self.model_runner.parallel_config.tensor_parallel_size  # type: ignore[attr-defined]
        self._roll_kept = self._roll_kept or LastExport()
        # vLLM numbers ranks stage by stage, so the remainder is the tensor-parallel rank.
        self._roll_receiver = open_receiver(plan, self._roll_kept, rank=self.rank % size)  # type: ignore[attr-defined]
        if plan.transport not in STAGED and plan.content is not Content.ADAPTERS:
            self._roll_reload.open()

    def roll_load_bucket(self, pickled: bytes) -> None:
        """Take in what this rank keeps of a pickled `Bucket`."""
        assert self._roll_receiver is not None, "roll_load_bucket without roll_begin_update"
        self._roll_receiver.take(pickle.loads(pickled))
        if self._roll_reload.is_open:
            self._roll_reload.load(self._roll_weights_taken())

    def roll_finish_update(self) -> str:
        """Digest of everything taken in."""
        assert self._roll_receiver is not None, "roll_finish_update without roll_begin_update"
        if incomplete := self._roll_receiver.incomplete:
            raise RuntimeError(f"weight update is incomplete: parts of {incomplete[:3]} did not come")
        return self._roll_receiver.digest

    def roll_commit(self) -> None:
        """Make the new weights the served ones. Raises RuntimeError when tensors are missing."""
        assert self._roll_receiver is not None, "roll_commit without roll_begin_update"
        missing: list[str] = []
        if self._roll_content is Content.ADAPTERS:
            # Runs through all: halves of adapters are kept on the way, a weight is a fault of the sender.
            for _ in self._roll_weights_taken():
                raise RuntimeError("weights came with an update of adapters alone")
        else:
            if not self._roll_reload.is_open:
                self._roll_reload.open()
                self._roll_reload.load(self._roll_weights_taken())
            missing = self._roll_reload.close()
        if not missing:
            if self.model_runner.lora_config is not None:  # type: ignore[attr-defined]
                self._roll_set_adapter()
            self._roll_receiver.committed()
        self._roll_give_up()
        if missing:
            # Raised last: this worker is at rest already, and takes the next attempt.
            raise RuntimeError(f"weight update is incomplete: {len(missing)} layers lack tensors, first {missing[0]}")

    def roll_start_adapter(self) -> None:
        """Serve an adapter of zeros, until one is pushed."""
        self._roll_set_adapter()

    def _roll_set_adapter(self) -> None:
        """The halves that were taken in; zeros under weights with adapters merged."""
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        set_adapter(manager, None if self._roll_content is Content.MERGED else self._roll_halves)

    def _roll_give_up(self) -> None:
        """Back to rest. A model left open is closed, mixed weights and all: the next update overwrites every tensor."""
        if self._roll_reload.is_open:
            self._roll_reload.close()
        if self._roll_receiver is not None:
            self._roll_receiver.close()
            self._roll_receiver = None

    def _roll_weights_taken(self) -> Iterator[tuple[str, Tensor]]:
        """What was taken in since the last call, without halves of adapters, which wait for the commit."""
        assert self._roll_receiver is not None
        for name, tensor in self._roll_receiver.tensors():
            if is_adapter(name):
                self._roll_halves[name] = tensor.clone()  # vLLM keeps them; the sender's memory is used again
            else:
                yield name, tensor

    # Sleep on CPU, where vLLM has none: the same states with host memory.

    def roll_memory(self) -> tuple[int, int]:
        """(weights, KV cache) in bytes, of this worker."""
        parameters = Storages(self._roll_model.parameters()).num_bytes
        return parameters + sum(map(packed_bytes, self._roll_model.modules())), self._roll_kv.num_bytes

    def roll_forget_frozen(self) -> None:
        """The weights below adapters are dropped."""
        if self._roll_kept is not None:
            self._roll_kept.frozen.forget()

    def roll_sleep(self, level: int) -> None:
        """Give memory back: the KV cache, and at level 2 the weights, packed ones too."""
        self._roll_kv.release(keep_content=False)
        if level == 2:
            self.roll_forget_frozen()
            for module in self._roll_model.modules():
                if packed_bytes(module):
                    del module.cpu_linear  # holds the only copy; the next update packs anew
            self._roll_weights = Storages(self._roll_model.parameters())
            self._roll_weights.release(keep_content=False)

    def roll_wake(self, tags: list[str]) -> None:
        """Take memory again. Weights of level 2 are arbitrary until the next update."""
        if WEIGHTS in tags and self._roll_weights is not None:
            self._roll_weights.restore()
            self._roll_weights = None
        if KV_CACHE in tags:
            self._roll_kv.restore(zero=True)  # the kernel reads whole blocks, and arbitrary bytes may be no numbers

    @property
    def _roll_kv(self) -> Storages:
        if self._roll_kv_storages is None:
            self._roll_kv_storages = Storages(self.model_runner.kv_caches)  # type: ignore[attr-defined]
        return self._roll_kv_storages

    @property
    def _roll_reload(self) -> Reload:
        if self._roll_reloading is None:
            self._roll_reloading = Reload(self._roll_model, self.vllm_config)  # type: ignore[attr-defined]
        return self._roll_reloading

    @property
    def _roll_model(self) -> nn.Module:
        return self.model_runner.get_model()  # type: ignore[attr-defined]

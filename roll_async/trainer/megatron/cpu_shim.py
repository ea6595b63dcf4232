"""Lets megatron-core run without CUDA: its modules see a proxy of `torch` in which "cuda" means the CPU.

`torch` itself keeps its behaviour for everybody else, but for `Tensor.cuda`. With CUDA at hand nothing here does
anything, and Megatron places what it makes on the device: a rank that shall run on the CPU of such a machine must not
see it (`hide_cuda`).
`tests/cluster/test_megatron_cpu_shim.py` checks each patched name, so that a new megatron-core fails loudly.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator

import torch

from roll_async.trainer.megatron.state import engine_import

CPU = torch.device("cpu")
FACTORIES = (
    "zeros",
    "ones",
    "empty",
    "tensor",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
    "rand",
    "randn",
)
# Modules that other modules import late: one imported after `install` would keep the real torch.
_MODULES = (
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.strategies.torch",
    "dist_checkpointing.exchange_utils",
    "transformer.moe.moe_layer",
    "transformer.moe.token_dispatcher",
    "models.gpt",
    "optimizer",
    "distributed",
    "pipeline_parallel",
)


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    # torch takes a bare number for the index of a CUDA device; Python's bool is an int.
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: object, **kwargs: object) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        # Pinning memory needs a CUDA driver.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


class _Proxy(types.ModuleType):
    """A module with some names replaced."""

    def __init__(self, base: types.ModuleType, replaced: dict[str, object]) -> None:
        super().__init__(base.__name__)
        self.__dict__.update(replaced)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_base"], name)


class _Stream:
    """A CUDA stream or event where everything has already happened."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def _nothing(self, *args: object, **kwargs: object) -> None:
        return None

    def record_event(self, *args: object) -> _Stream:
        return self

    wait_stream = wait_event = synchronize = wait = record = _nothing


def _proxy_of_torch() -> _Proxy:
    stream = _Stream()
    cuda = _Proxy(
        torch.cuda,
        {
            # Megatron hands it on as the `device` of what it makes.
            "current_device": lambda: CPU,
            "synchronize": lambda *args, **kwargs: None,
            "empty_cache": lambda: None,
            "current_stream": lambda *args: stream,
            "default_stream": lambda *args: stream,
            "Stream": _Stream,
            "Event": _Stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "nvtx": types.SimpleNamespace(range_push=lambda *args: None, range_pop=lambda: None),
            "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
            "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
            "manual_seed": torch.manual_seed,
        },
    )
    distributed = _Proxy(torch.distributed, {"all_gather": _gather_uneven, "reduce_scatter": _reduce_scatter_uneven})
    factories = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    return _Proxy(torch, {"cuda": cuda, "distributed": distributed, **factories})


def _gather_uneven(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: torch.distributed.ProcessGroup | None = None
) -> None:
    """`all_gather` that takes parts of different length, as NCCL's does: experts get different numbers of tokens."""
    longest = max(part.shape[0] for part in outputs)
    if all(part.shape[0] == longest for part in outputs):
        torch.distributed.all_gather(outputs, tensor.contiguous(), group=group)
        return
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    gathered = [torch.empty_like(padded) for _ in outputs]
    torch.distributed.all_gather(gathered, padded, group=group)
    for part, whole in zip(outputs, gathered, strict=True):
        part.copy_(whole[: part.shape[0]])


def _reduce_scatter_uneven(
    output: torch.Tensor, inputs: list[torch.Tensor], group: torch.distributed.ProcessGroup | None = None
) -> None:
    """`reduce_scatter` (sum) that takes parts of different length, as NCCL's does."""
    assert group is not None
    for rank, part in enumerate(inputs):
        # `reduce` works in place, and the inputs are the caller's.
        total = part.contiguous().clone()
        torch.distributed.reduce(total, dst=torch.distributed.get_global_rank(group, rank), group=group)
        if rank == group.rank():
            output.copy_(total)


def hide_cuda() -> None:
    """No CUDA device for this process and those it starts. To be called before anything asks torch for devices."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def require_device(device: str, *, cuda: bool) -> None:
    """Raises ValueError for a rank on `device` that Megatron would put elsewhere. `cuda`: this process sees a GPU."""
    if device == "cpu" and cuda:
        raise ValueError(
            "this rank shall run on the CPU, but its process sees a CUDA device, where Megatron would put its buffers; "
            "set CUDA_VISIBLE_DEVICES='' before the process starts, or give the role a device_mapping"
        )
    if device != "cpu" and not cuda:
        raise ValueError(f"this rank shall run on {device}, but torch sees no CUDA device")


def install(*, cuda: bool | None = None) -> None:
    """Patch megatron-core for this process. Idempotent; a no-op with CUDA, which torch is asked for by default."""
    # Megatron warns once for each accelerator library that is not there; the choice is logged where it is made.
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex|apex|transformer_engine).*")
    # From 0.19 on also of its next kind of model, and of how its own checkpoints are read.
    for name in ("models.gpt.gpt_model", "dist_checkpointing.strategies.common"):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
    cuda = torch.cuda.is_available() if cuda is None else cuda
    engine_import.problem()  # hides half an install from the imports below
    engine_import.apex_problem(cuda=cuda)
    if cuda:
        return
    with _nothing_compiled():
        for name in _MODULES:
            importlib.import_module(f"megatron.core.{name}")
    proxy = _proxy_of_torch()
    for name, module in list(sys.modules.items()):
        # Bodies in fusions/ may be compiled already: they must see the real torch.
        if name.startswith("megatron.core") and not name.startswith("megatron.core.fusions"):
            if getattr(module, "torch", None) is torch:
                module.torch = proxy  # type: ignore[attr-defined]
    _patch_random()
    _patch_moe()
    # A method of a tensor is out of reach for a proxy of the module.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Inside, `torch.compile` gives back what it is given. Megatron compiles some fused operations when it is imported,
    which is for CUDA; on a CPU it would only import the compiler, for two seconds of each rank's start.
    """
    original = torch.compile
    torch.compile = lambda model=None, **options: (lambda function: function) if model is None else model
    try:
        yield
    finally:
        torch.compile = original


def _patch_random() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # On the CPU both trackers are one generator, and this module warns of it on every fork.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _patch_moe() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    # The original converts split sizes only when they are CUDA tensors.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
    )


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Inside, `Tensor.type()` says torch.cuda.FloatTensor: the optimizer code compares these strings."""
    if torch.cuda.is_available():
        yield
        return
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, dtype: object = None, *args: object, **kwargs: object) -> object:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)  # type: ignore[arg-type]
        return original(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]

"""Adam's state by model parameter, in the parameter's own shape, whoever holds it.

Megatron keeps it by optimizer: the plain one whole, the distributed one as a range of the flattened parameter on each
data-parallel rank, experts in an optimizer of their own. Its own formats carry that into the file, and its resharding
of distributed state loses the moments. Here the file only knows parameters: any layout reads what any other wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "fp32_param"
"""The float32 copy of a parameter of lower precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterState:
    """Adam's state of one parameter on this rank."""

    parameter: torch.nn.Parameter
    main: Tensor | None
    """What the optimizer steps; of a distributed optimizer this rank's range, flat, or None when it holds none."""
    optimizer: torch.optim.Optimizer
    start: int
    """Where the range begins in the flattened parameter; 0 when whole."""
    group: dist.ProcessGroup | None
    """Ranks that hold the other ranges; None when whole."""

    @property
    def names(self) -> tuple[str, ...]:
        """Tensors that make up the state."""
        return MOMENTS if self.parameter.dtype == torch.float32 else (*MOMENTS, MAIN)

    def gathered(self, name: str, owner: int = 0) -> Tensor:
        """The whole tensor float32 on rank `owner` of the group, on the CPU; elsewhere a tensor of the same shape
        without memory. Collective over the group.
        """
        own = self._own(name)
        if self.group is None:
            assert own is not None
            return own.detach().float().view(self.parameter.shape)
        whole = torch.zeros(self.parameter.numel(), dtype=torch.float32, device=self.parameter.device)
        if own is not None:
            whole[self.start : self.start + own.numel()] = own
        # Ranges do not overlap, and all else is 0: the sum is the whole, whatever their sizes.
        dist.reduce(whole, dst=dist.get_global_rank(self.group, owner), group=self.group)
        if self.group.rank() != owner:
            return torch.zeros((), dtype=torch.float32).expand(self.parameter.shape)
        return whole.view(self.parameter.shape).cpu()

    def _own(self, name: str) -> Tensor | None:
        if self.main is None:
            return None
        if name == MAIN:
            return self.main
        state = self.optimizer.state.get(self.main, {})
        # Adam makes its moments in its first step; before, they are 0.
        return state[name] if name in state else torch.zeros_like(self.main, dtype=torch.float32)

    def restore(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Set this rank's part from whole tensors. `steps`: optimizer steps taken so far. Without tensors the parameter
        begins: as it is, with moments of 0, and without a step.
        """
        if self.main is None:
            return
        if not tensors:
            zeros, steps = torch.zeros(self.parameter.shape), 0
            tensors = {MAIN: self.parameter.detach(), **{name: zeros for name in MOMENTS}}
        part = {
            name: x.reshape(-1)[self.start : self.start + self.main.numel()].view(self.main.shape)
            for name, x in tensors.items()
        }
        if MAIN in part:
            self.main.data.copy_(part[MAIN])
        state = self.optimizer.state[self.main]
        for name in MOMENTS:
            held = state.get(name)
            if held is None:
                state[name] = part[name].to(device=self.main.device, dtype=torch.float32, copy=True)
            else:
                held.copy_(part[name])
        if _counts_by_parameter(self.optimizer):
            # The parameter's device, where a fused step wants it: the rest may be in host memory until that step.
            state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=self.parameter.device)


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers behind one: dense parameters, experts, and one per interleaved stage."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def parameter_states(optimizer: MegatronOptimizer) -> Iterator[ParameterState]:
    """Every trained parameter, in an order that all data-parallel ranks share."""
    for part in parts_of(optimizer):
        # A rank without trained parameters of this kind has such a one.
        if getattr(part, "is_stub_optimizer", False):
            continue
        if isinstance(part, DistributedOptimizer):
            yield from _distributed(part)
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            yield from _with_main_parameters(part)
        else:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    yield _whole(parameter, parameter, part.optimizer)


def _whole(parameter: torch.nn.Parameter, main: Tensor, optimizer: torch.optim.Optimizer) -> ParameterState:
    return ParameterState(parameter=parameter, main=main, optimizer=optimizer, start=0, group=None)


def _with_main_parameters(part: Float16OptimizerWithFloat16Params) -> Iterator[ParameterState]:
    for halves, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
        for parameter, main in zip(halves, mains, strict=True):
            yield _whole(parameter, main, part.optimizer)
    for group in part.fp32_from_fp32_groups:
        for parameter in group:
            yield _whole(parameter, parameter, part.optimizer)


def _distributed(part: DistributedOptimizer) -> Iterator[ParameterState]:
    for buffer in part.buffers:
        for parameter in buffer.params:
            held = parameter in part.model_param_group_index_map
            main, start = None, 0
            if held:
                group, order = part.model_param_group_index_map[parameter]
                main = part.optimizer.param_groups[group]["params"][order]
                start = part._get_model_param_range_map(parameter)["param"].start
            yield ParameterState(
                parameter=parameter, main=main, optimizer=part.optimizer, start=start, group=part.data_parallel_group
            )


def restore_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    """Tell optimizers that count their steps by group. Transformer Engine's and Apex's make the entry in their first
    step only: looking for it before would leave their bias correction to begin anew.
    """
    for part in parts_of(optimizer):
        if part.optimizer is not None and not _counts_by_parameter(part.optimizer):
            for group in part.optimizer.param_groups:
                group["step"] = steps


def _counts_by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """As torch's own Adam does."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)

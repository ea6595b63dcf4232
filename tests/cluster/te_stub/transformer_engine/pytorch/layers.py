"""Linear layers and norms, with Transformer Engine's parameter names and marks."""

import torch
import torch.nn.functional as F
from torch import nn


class _Layer(nn.Module):
    """What Megatron reads off every layer: no fp8, and an extra state that says so."""

    fp8 = fp8_calibration = False

    def __init__(self):
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state): ...

    def init_fp8_metadata(self, num_gemms=1): ...


def _mark_shard(parameter, dim):
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


class Linear(_Layer):
    """Column and row parallel, with and without sequence parallelism, by Megatron's own collectives."""

    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        tp_group=None,
        tp_size=1,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        init_method=None,
        **others,
    ):
        super().__init__()
        assert others.get("device", "cpu") in ("cpu", torch.device("cpu")), others
        self.parallel_mode, self.tp_group, self.tp_size = parallel_mode, tp_group, tp_size
        self.use_bias, self.return_bias = bias, return_bias
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        if parallel_mode == "column":
            out_features //= tp_size
        if parallel_mode == "row":
            in_features //= tp_size
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        _mark_shard(self.weight, 1 if parallel_mode == "row" else 0)
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype))
            if parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel
            elif parallel_mode == "column":
                _mark_shard(self.bias, 0)

    def forward(self, x, is_first_microbatch=None, **others):
        return self._product(x)

    def _product(self, x):
        from megatron.core.tensor_parallel import mappings

        parallel = self.tp_size > 1
        if parallel and self.parallel_mode == "column":
            if self.sequence_parallel:
                x = mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
            else:
                x = mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        y = F.linear(x, self.weight)
        if parallel and self.parallel_mode == "row":
            if self.sequence_parallel:
                y = mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
            else:
                y = mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group)
        bias = self.bias if self.use_bias else None
        if self.return_bias:
            return y, bias
        return y if bias is None else y + bias


class LayerNormLinear(Linear):
    """A norm in front, on this rank's positions."""

    def __init__(self, in_features, out_features, eps=1e-5, normalization="LayerNorm", **others):
        super().__init__(in_features, out_features, **others)
        assert normalization == "RMSNorm"
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=others.get("params_dtype")))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, x, is_first_microbatch=None, **others):
        return self._product(F.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self.eps))


class RMSNorm(_Layer):
    def __init__(self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, **others):
        super().__init__()
        hidden_size = others.get("hidden_size", normalized_shape)  # the former name, of megatron-core 0.16
        assert not others.get("zero_centered_gamma")
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class LayerNorm(RMSNorm): ...


class GroupedLinear(_Layer):
    """The experts of a rank; tokens come sorted by expert, `m_splits` of each."""

    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        tp_size=1,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        **others,
    ):
        super().__init__()
        assert not bias
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        if parallel_mode == "column":
            out_features //= tp_size
        if parallel_mode == "row":
            in_features //= tp_size
        for number in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
            _mark_shard(weight, 1 if parallel_mode == "row" else 0)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x, m_splits, is_first_microbatch=None):
        assert sum(m_splits) == x.shape[0], (m_splits, x.shape)
        parts = [F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(x.split(m_splits))]
        return (torch.cat(parts), None) if self.return_bias else torch.cat(parts)


class Fp8Padding(nn.Module): ...


class Fp8Unpadding(nn.Module): ...

"""What lies on the host and what on the device, seen without one: torch's meta device stands for it."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core import parallel_state

from roll_async.trainer.megatron.micro_batches import ModelFeed
from roll_async.trainer.megatron.runner import ModelRunner
from roll_async.trainer.megatron.settings import MegatronSettings
from roll_async.trainer.megatron.state.optimizer_state import MAIN, ParameterState

DEVICE = torch.device("meta")


class Recorder(torch.nn.Linear):
    """A model that notes what it is called with."""

    def forward(self, tokens, positions, mask, **keywords):
        self.seen = keywords
        return tokens


def test_local_layers_find_the_bounds_of_packed_rows_on_the_host_and_kernels_on_the_device(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)
    model = Recorder(1, 1, device=DEVICE)
    config = SimpleNamespace(num_moe_experts=None, moe_aux_loss_coeff=0.0)
    runner = ModelRunner([model], config, MegatronSettings(model_folder="", transformer_impl="local"))
    feed = {name: torch.zeros(1, 5, device=DEVICE) for name in ("tokens", "positions", "targets", "asked", "padding")}
    starts = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    runner._forward(model, ModelFeed(bounds=(0, 2, 5), starts=starts, **feed))
    packed = model.seen["packed_seq_params"]
    assert (packed.max_seqlen_q, packed.lengths, packed.cu_seqlens_q_padded.tolist()) == (3, (2, 3), [0, 2, 5])
    assert packed.cu_seqlens_kv_padded.device.type == "cpu" and packed.cu_seqlens_q.device == DEVICE


def test_a_restored_step_counter_lies_with_the_parameter_even_when_the_moments_are_on_the_host():
    parameter = torch.nn.Parameter(torch.empty(2, dtype=torch.bfloat16, device=DEVICE))
    main = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([main], fused=True)
    state = ParameterState(parameter=parameter, main=main, optimizer=optimizer, start=0, group=None)
    state.restore({name: torch.ones(2) for name in state.names}, 3)
    held = optimizer.state[main]
    assert state.names[-1] == MAIN and main.tolist() == [1.0, 1.0]
    assert held["step"].device == DEVICE and held["exp_avg"].device.type == "cpu"

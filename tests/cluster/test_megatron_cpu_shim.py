"""Each name that the CPU shim replaces, against the megatron-core that is installed: a release that renames or stops
using one fails here, not somewhere in a step.
"""

import importlib
import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

import megatron_cases as cases

from roll_async.trainer.megatron import cpu_shim
from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec

ROOT = Path(__file__).resolve().parents[2]

# Modules of megatron-core that name CUDA in code which runs on every step, and how they name it.
USERS = {
    "tensor_parallel.layers": "torch.cuda.current_device()",
    "tensor_parallel.mappings": "torch.cuda.current_device()",
    "tensor_parallel.random": "torch.cuda",
    "pipeline_parallel.p2p_communication": "torch.cuda.synchronize()",
    "pipeline_parallel.schedules": 'device="cuda"',
    "distributed.param_and_grad_buffer": "torch.cuda.current_device()",
    "optimizer.clip_grads": "torch.cuda.FloatTensor",
    "optimizer.grad_scaler": "'cuda'",
    "transformer.moe.token_dispatcher": "torch.cuda",
    "transformer.moe.router": "torch.cuda.current_device()",
    "models.common.embeddings.rotary_pos_embedding": "torch.cuda.current_device()",
}


@pytest.fixture(scope="module", autouse=True)
def installed():
    cpu_shim.install()


def core(name):
    return importlib.import_module(f"megatron.core.{name}")


@pytest.mark.parametrize("name", USERS)
def test_the_modules_that_name_cuda_see_the_proxy(name):
    module = core(name)
    assert USERS[name] in inspect.getsource(module), "no longer names CUDA: drop it here"
    assert module.torch is not torch
    assert module.torch.cuda.current_device() == torch.device("cpu")


def test_torch_itself_stays_as_it_is():
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert not isinstance(torch.cuda, type(core("tensor_parallel.layers").torch))


@pytest.mark.parametrize("factory", cpu_shim.FACTORIES)
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_a_factory_puts_cuda_tensors_on_the_cpu(factory, device):
    create = getattr(core("tensor_parallel.layers").torch, factory)
    like = factory.endswith("_like")
    arguments = (torch.zeros(2),) if like else ([1.0, 2.0],) if factory == "tensor" else (2,)
    if factory == "full":
        arguments = ((2,), 1.0)
    made = create(*arguments, device=device)
    assert made.device.type == "cpu" and made.shape == (2,)


@pytest.mark.parametrize("name", ["synchronize", "empty_cache", "current_stream", "default_stream", "get_rng_state"])
def test_cuda_calls_without_a_device_do_nothing(name):
    getattr(core("tensor_parallel.layers").torch.cuda, name)()


def test_streams_and_events_have_always_finished():
    cuda = core("distributed.param_and_grad_buffer").torch.cuda
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    event = cuda.Event()
    event.record()
    event.wait()
    with cuda.stream(stream):
        cuda.nvtx.range_push("x")
        cuda.nvtx.range_pop()


def test_the_rng_tracker_forks_the_one_generator_there_is():
    random = core("tensor_parallel.random")
    before = torch.get_rng_state()
    assert (random._get_cuda_rng_state() == before).all()
    torch.rand(3)
    random._set_cuda_rng_state(before)
    assert (torch.get_rng_state() == before).all()
    assert logging.getLogger(random.__name__).level == logging.ERROR


def test_the_generator_of_cuda_is_that_of_the_cpu():
    cuda = core("tensor_parallel.layers").torch.cuda
    before = torch.get_rng_state()
    cuda.manual_seed(11)
    drawn, state = torch.rand(3), cuda.get_rng_state()
    torch.manual_seed(11)
    assert torch.rand(3).equal(drawn)
    cuda.set_rng_state(before)
    assert torch.get_rng_state().equal(before) and not state.equal(before)


def test_a_rank_on_the_cpu_does_not_import_the_compiler():
    program = "import sys, roll_async.trainer.megatron.worker; assert 'torch._inductor.compile_fx' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


WITH_CUDA = """
import torch
from roll_async.trainer.megatron import cpu_shim

own = torch.Tensor.cuda
cpu_shim.install(cuda=True)
import sys, importlib
for name in cpu_shim._MODULES:
    importlib.import_module(f"megatron.core.{name}")
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import token_dispatcher

core = {name: vars(m) for name, m in sys.modules.items() if name.startswith("megatron.core")}
named = {name: names["torch"] for name, names in core.items() if "torch" in names}
named.pop("megatron.core.dist_checkpointing.strategies")  # has a module of its own by that name
assert "torch._inductor.compile_fx" in sys.modules  # fused operations are compiled
assert len(named) > 40 and all(value is torch for value in named.values()), named
assert torch.Tensor.cuda is own
assert random._get_cuda_rng_state.__module__ == random.__name__
assert token_dispatcher.maybe_move_tensor_to_cpu.__module__ == "megatron.core.transformer.moe.moe_utils"
"""


def test_with_cuda_at_hand_nothing_is_touched():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "0"}  # a vLLM here may have set it
    done = subprocess.run([sys.executable, "-c", WITH_CUDA], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_rank_is_refused_where_megatron_would_put_its_buffers_elsewhere():
    with pytest.raises(ValueError, match="shall run on the CPU, but .* set CUDA_VISIBLE_DEVICES=''"):
        cpu_shim.require_device("cpu", cuda=True)
    with pytest.raises(ValueError, match="shall run on cuda, but torch sees no CUDA device"):
        cpu_shim.require_device("cuda", cuda=False)
    cpu_shim.require_device("cpu", cuda=False)
    cpu_shim.require_device("cuda", cuda=True)
    nowhere = RankSpec(rank=0, world_size=1, master_addr="127.0.0.1", master_port=1, device="cuda")
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        MegatronWorker(nowhere, cases.MegatronSettings(model_folder="unread")).start()


def test_experts_without_transformer_engine_get_the_name_that_megatron_asks_for_and_never_binds(rank_pool):
    source = inspect.getsource(core("transformer.moe.moe_utils"))
    assert "if te_general_gemm is not None" in source, "no longer used: drop the repair"
    # Later ones bind it themselves.
    assert rank_pool.run(cases.routers_product, 1) in ([("unbound", "unbound", None)], [(None, None, None)])


def test_split_sizes_become_numbers_for_gloo():
    dispatcher = core("transformer.moe.token_dispatcher")
    assert "maybe_move_tensor_to_cpu" in inspect.getsource(dispatcher), "no longer used: drop the patch"
    sizes = dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
    assert not isinstance(sizes, torch.Tensor) and list(sizes) == [1, 2]
    assert dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2])).tolist() == [1, 2]


def test_tensors_stay_where_they_are_when_sent_to_cuda():
    tensor = torch.zeros(2)
    assert tensor.cuda() is tensor


def test_the_optimizer_finds_the_type_names_it_compares_and_only_inside():
    for name in ("optimizer.clip_grads", "optimizer.optimizer", "optimizer.distrib_optimizer"):
        assert "torch.cuda." in inspect.getsource(core(name)), f"{name} no longer compares type names: drop the patch"
    tensor = torch.zeros(1)
    with cpu_shim.cuda_type_names():
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert tensor.type(torch.float64).dtype == torch.float64
    assert tensor.type() == "torch.FloatTensor"


def test_the_interfaces_that_uneven_exchanges_stand_for_are_in_use():
    source = inspect.getsource(core("tensor_parallel.mappings"))
    assert "torch.distributed.all_gather(" in source and "torch.distributed.reduce_scatter(" in source
    proxy = core("tensor_parallel.mappings").torch.distributed
    assert proxy.all_gather is cpu_shim._gather_uneven and proxy.reduce_scatter is cpu_shim._reduce_scatter_uneven


def test_uneven_parts_are_gathered_and_reduced(rank_pool):
    for rank, (parts, output) in enumerate(rank_pool.run(cases.exchange_uneven, 2)):
        assert parts == [[[1.0, 1.0]], [[2.0, 2.0]] * 3]
        assert output == ([[3.0, 3.0]] if rank == 0 else [[6.0, 6.0]] * 3)

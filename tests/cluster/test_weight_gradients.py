"""Products that add to the step's float32 sums: the gradients of Megatron's layers without a gradient in between.

A CPU has no product of bf16 factors with a float32 sum. A few lines with the operator's signature take its place.
"""

import contextlib
import logging
import math

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases

from roll_async.checkpoint.folders.hf_folder import HfFolder
from roll_async.checkpoint.hf_names.families import family_of
from roll_async.trainer.megatron import weight_gradients
from roll_async.trainer.megatron.model.model_config import transformer_config

FUSED = {"gradient_accumulation_fusion": True}


@contextlib.contextmanager
def products_of_bf16(into):
    """`torch.addmm` with `out_dtype` on the CPU, by a function of (sum, first, second)."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", lambda x, a, b, out_dtype, *, beta=1, alpha=1, out: out.copy_(into(x, a, b)), "CPU")
    try:
        yield
    finally:
        library._destroy()


def exact(sums, first, second):
    return sums + first.float() @ second.float()


def rounded(sums, first, second):
    return sums + (first @ second).float()


def rounded_once_more(sums, first, second):
    return (sums.bfloat16() + first @ second).float()


def gradients(rank, world_size, port, settings):
    """Of each parameter after one step of four micro-batches, and how many weights took theirs from a product."""
    weight_gradients.use_torch_products()
    with products_of_bf16(exact):
        worker = cases.start_worker(rank, world_size, port, settings)
        _, policy = cases.batch()
        worker.update_policy(policy, 1)
        parameters = dict(worker._model.named_parameters())
        found = {name: parameter.main_grad.clone() for name, parameter in parameters.items()}
        by_product = [name for name, parameter in parameters.items() if parameter.grad_added_to_main_grad]
        worker.stop()
    return found, by_product


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world_size", "parallel"),
    [
        ("dense, tied", 1, {}),
        ("dense", 2, {"tensor": 2, "sequence_parallel": True}),
        ("dense", 2, {"pipeline": 2}),
        ("MoE", 2, {"expert": 2}),
    ],
    ids=str,
)
def test_gradients_are_those_of_megatrons_own_layers(rank_pool, tmp_path, kind, world_size, parallel):
    folder = cases.model_folder(tmp_path, kind)
    apart, together = (
        rank_pool.run(gradients, world_size, settings=cases.settings_of(folder, parallel=parallel, extra=extra))
        for extra in ({}, FUSED)
    )
    for (expected, none), (found, by_product) in zip(apart, together, strict=True):
        assert none == []
        linear = [name for name in found if "linear" in name and name.endswith("weight") and "norm" not in name]
        assert linear and set(linear) <= set(by_product)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.slow
def test_a_bf16_gradient_is_rounded_once_less(rank_pool, tmp_path):
    folder = cases.model_folder(tmp_path, "dense")
    settings = {name: cases.settings_of(folder, dtype="bf16", extra=x) for name, x in (("apart", {}), ("fused", FUSED))}
    apart, fused = (rank_pool.run(gradients, 1, settings=each)[0][0] for each in settings.values())
    (last,) = [name for name in fused if name.endswith("layers.3.mlp.linear_fc2.weight")]
    # What goes into the product of the last layer is the same in both: only the sums differ.
    as_bf16 = fused[last].bfloat16().float()
    assert 0 < (fused[last] - apart[last]).norm() / fused[last].norm() < 2**-7
    assert not torch.equal(as_bf16, fused[last])
    assert all(sums.dtype == torch.float32 for sums in fused.values())


@pytest.mark.parametrize(
    ("product", "problem"),
    [(exact, None), (rounded, None), (rounded_once_more, "rounds the sum"), (None, "refuses it")],
)
def test_a_torch_whose_product_rounds_the_sum_or_is_not_there_is_told(product, problem):
    with contextlib.nullcontext() if product is None else products_of_bf16(product):
        found = weight_gradients._problem_of(torch.device("cpu"))
    assert found == problem if problem is None else problem in found


def test_megatron_is_given_the_product_on_a_device_alone(monkeypatch, caplog):
    monkeypatch.setattr(weight_gradients.layers, "_grad_accum_fusion_available", False)
    monkeypatch.setattr(weight_gradients, "_problem_of", lambda device: None)
    caplog.set_level(logging.INFO)
    weight_gradients.fused.cache_clear()
    try:
        assert weight_gradients.fused("cpu") is False and not weight_gradients.layers._grad_accum_fusion_available
        assert weight_gradients.fused("cuda") is True and "torch.addmm" in caplog.text
        assert weight_gradients.layers.fused_weight_gradient_mlp_cuda is weight_gradients.TORCH_PRODUCTS
    finally:
        weight_gradients.fused.cache_clear()


@pytest.mark.parametrize("fused", [True, False])
def test_layers_are_built_for_what_the_device_can(monkeypatch, tmp_path, fused):
    monkeypatch.setattr(weight_gradients, "fused", lambda device: fused)
    folder = cases.model_folder(tmp_path, "dense")
    config = transformer_config(HfFolder(folder).config, family_of("Qwen2ForCausalLM"), cases.settings_of(folder))
    assert config.gradient_accumulation_fusion is fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_adds_to_the_sums(dtype):
    torch.manual_seed(0)
    inputs, gradients_, sums = torch.randn(5, 3), torch.randn(5, 4), torch.randn(4, 3)
    inputs, gradients_, before = inputs.to(dtype), gradients_.to(dtype), sums.clone()
    with products_of_bf16(exact) if dtype == torch.bfloat16 else contextlib.nullcontext():
        weight_gradients.add_product(inputs, gradients_, sums)
    for o in range(4):
        for i in range(3):
            wanted = before[o, i] + math.fsum(float(gradients_[n, o]) * float(inputs[n, i]) for n in range(5))
            assert sums[o, i] == pytest.approx(float(wanted), abs=1e-5)


@pytest.mark.parametrize(("last", "finite"), [(2.0, True), (math.nan, False), (-math.inf, False)])
def test_all_ranks_skip_a_step_or_none(rank_pool, last, finite):
    assert rank_pool.run(cases.finite_by_all, 2, gradients=[0.0, last]) == [finite, finite]

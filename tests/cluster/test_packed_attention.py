"""Attention of packed rows in one call: kernels of a device are replaced by loops with their signatures, so that
bounds, longest row, scale and window are checked by equality with rows one by one.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("megatron.core")

from torch.nn.attention import varlen

from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec  # first: it installs the shim

# isort: split
from roll_async.trainer.megatron.model import attention
from roll_async.trainer.megatron.model.attention import PackedRows, by_flash, by_torch, flash_problem, row_by_row
from tests.rounding import assert_near, reordered

EXACT = 1e-6
CALLS = []


def looped(query, key, value, bounds, longest, scale, left):
    """Every query by itself."""
    assert bounds.dtype == torch.int32 and int(bounds[-1]) == len(query) == len(key) == len(value)
    assert longest == int(bounds.diff().max())
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out = []
    for start, end in itertools.pairwise(bounds.tolist()):
        for at in range(start, end):
            first = start if left < 0 else max(start, at - left)
            weights = torch.softmax(torch.einsum("hd,khd->hk", query[at], key[first : at + 1]) * scale, -1)
            out.append(torch.einsum("hk,khd->hd", weights, value[first : at + 1]))
    return torch.stack(out)


def torch_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert cu_seq_q is cu_seq_k and max_q == max_k and window_size[1] == 0 and enable_gqa
    CALLS.append(len(query))
    return looped(query, key, value, cu_seq_q, max_q, scale, window_size[0])


def torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert window_size[1] == 0
    return looped(query, key, value, cu_seq_q, max_q, scale, window_size[0])


def flash(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    assert causal and dropout_p == 0 and cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
    return looped(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size[0])


KERNELS = {"torch 2.13": by_torch(torch_2_13), "torch 2.11": by_torch(torch_2_11), "flash_attn": by_flash(flash)}


def packed(lengths):
    bounds = [0, *itertools.accumulate(lengths)]
    starts = torch.tensor(bounds, dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return PackedRows.of(bounds, starts, positions, ranks=1, on_device=False)


def with_gradients(attend, inputs, *arguments):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves, *arguments)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 3, 100]),
    scale=st.sampled_from([None, 0.3]),
    name=st.sampled_from(sorted(KERNELS)),
)
def test_one_call_over_all_rows_equals_rows_one_by_one_with_their_gradients(lengths, heads, window, scale, name):
    generator = torch.Generator().manual_seed(sum(lengths))
    inputs = [torch.randn(sum(lengths), count, 8, generator=generator) for count in (heads[0], heads[1], heads[1])]
    arguments = packed(lengths), scale, window
    one_call = with_gradients(KERNELS[name], inputs, *arguments)
    for found, wanted in zip(one_call, with_gradients(row_by_row, inputs, *arguments), strict=True):
        assert_near(found, wanted, EXACT, of=max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_sink_takes_its_share_of_every_softmax_with_exact_gradients(window, scale):
    lengths, generator = [5, 5, 2, 9], torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sum(lengths), n, 8, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    sinks = torch.tensor([-1.0, 0.5, 2.0, -30.0], dtype=torch.float64)
    rows = packed(lengths)

    def ours(query, key, value, sinks):
        return row_by_row(query, key, value, rows, scale, window, sinks)

    def by_hand(query, key, value, sinks):
        key, value = (x.repeat_interleave(2, 1) for x in (key, value))
        out = []
        for start, end in itertools.pairwise(rows.cu_seqlens_q.tolist()):
            for at in range(start, end):
                first = start if window is None else max(start, at - window + 1)
                scores = torch.einsum("hd,khd->hk", query[at], key[first : at + 1]) * (scale or 8**-0.5)
                weights = torch.softmax(torch.cat((scores, sinks[:, None]), 1), -1)[:, :-1]
                out.append(torch.einsum("hk,khd->hd", weights, value[first : at + 1]))
        return torch.stack(out)

    inputs = [x.float() for x in (query, key, value, sinks)]
    wanted = with_gradients(by_hand, [query, key, value, sinks])
    for found, exact in zip(with_gradients(ours, inputs), wanted, strict=True):
        assert_near(found, exact, EXACT, of=max(1.0, float(exact.abs().max())))


def test_the_signature_that_is_called_is_that_of_the_installed_torch():
    import inspect

    ours, theirs = (inspect.signature(each).parameters for each in (torch_2_13, varlen.varlen_attn))
    if "enable_gqa" in theirs:
        assert list(ours) == list(theirs)
    assert {"scale", "window_size"} <= theirs.keys()


@pytest.mark.parametrize(
    ("dtype", "head", "device", "reason"),
    [
        (torch.bfloat16, 64, "cpu", "on cpu it is the fastest"),
        (torch.float32, 64, "cuda", "take bf16 and fp16, not torch.float32"),
        (torch.bfloat16, 20, "cuda", "a head of 20 is no multiple of 8"),
        (torch.bfloat16, 512, "cuda", "a head of 512 is no multiple of 8 up to 256"),
    ],
)
def test_where_no_kernel_takes_the_rows_the_log_says_why(dtype, head, device, reason):
    assert reason in flash_problem(dtype, head, torch.device(device))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral window", "deepseek v3"])
def test_a_packed_step_makes_one_call_a_layer_and_micro_batch_and_is_the_padded_step(name, tmp_path, monkeypatch):
    """Latent attention has values of another size than keys."""
    import megatron_cases as cases
    from tiny_families import save_tiny

    folder = str(tmp_path)
    save_tiny(name, tmp_path)
    rows, _ = cases.batch(num_rows=6)
    with_packs = {"micro_batching": "packed", "max_tokens_per_microbatch": 64}
    losses = {}
    monkeypatch.setattr(attention, "choose_packed_attention", lambda *_: by_torch(torch_2_13))
    for kind, fields in {"padded": {}, "packed": with_packs}.items():
        worker = MegatronWorker(RankSpec.alone(), cases.settings_of(folder, **fields))
        worker.start()
        layers = worker._model.config.num_layers
        CALLS.clear()
        losses[kind] = [worker.supervised_update(rows.tokens, rows.lengths, rows.mask) for _ in range(2)]
        worker.stop()
    assert_near(torch.tensor(losses["packed"]), torch.tensor(losses["padded"]), 4 * reordered(rows.tokens.numel()))
    batches = len(CALLS) / 2 / layers
    assert batches.is_integer() and 1 < batches < len(rows.lengths)


def test_the_rotation_is_one_graph_that_is_compiled_twice_however_many_lengths_come(monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # an engine on a CPU sets it for its process
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    turned = torch.compile(attention._rotated, backend=count, fullgraph=True)
    for positions in (64, 63, 17, 2, 40):
        generator = torch.Generator().manual_seed(positions)
        query, key = (torch.randn(positions, heads, 12, generator=generator) for heads in (4, 2))
        angles = torch.rand(positions, 1, 4, generator=generator)
        for found, wanted in zip(
            turned(query, key, angles.cos(), angles.sin(), False),
            attention._rotated(query, key, angles.cos(), angles.sin(), False),
            strict=True,
        ):
            assert_near(found, wanted, reordered(2))
            assert torch.equal(found[..., 8:], (query if found.shape[1] == 4 else key)[..., 8:])
    assert count.frame_count == 2


def test_swiglu_in_one_pass_equals_its_steps_with_their_gradient():
    """On a device with Triton Megatron's own, compiled; on a CPU its steps."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    def steps(x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    x = torch.randn(5, 1, 64, generator=torch.Generator().manual_seed(0))
    one_pass, by_steps = (with_gradients(form, [x]) for form in (lambda y: bias_swiglu_impl(y, None), steps))
    for found, wanted in zip(one_pass, by_steps, strict=True):
        assert_near(found, wanted, reordered(8))


@pytest.mark.parametrize("there", [False, True])
def test_swiglu_is_fused_where_passes_are_compiled(there, tmp_path, monkeypatch):
    import megatron_cases as cases

    from roll_async.checkpoint.folders.hf_folder import HfFolder
    from roll_async.checkpoint.hf_names.families import family_of
    from roll_async.trainer.megatron.model import model_config

    monkeypatch.setattr(model_config, "compiles", lambda device: there)
    folder = cases.model_folder(tmp_path, "dense")
    hf = HfFolder(folder).config
    config = model_config.transformer_config(hf, family_of(hf.architecture()), cases.settings_of(folder))
    assert config.bias_activation_fusion is there

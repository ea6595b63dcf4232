"""Tiny models and batches of the Megatron tests, and what one rank reports about a layout."""

import gc
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roll_async.algorithms.objective import LossSettings
from roll_async.commands.certify import rank_side
from roll_async.commands.certify.rank_side import start_worker
from roll_async.config.options.policy_loss_options import PpoOptions
from roll_async.trainer.distillation import chosen_rows
from roll_async.trainer.megatron import cpu_shim
from roll_async.trainer.megatron.model import output_head
from roll_async.trainer.megatron.model.lora import Adapter
from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings, ParallelSizes
from roll_async.trainer.megatron.state.host_state import HostState
from roll_async.trainer.megatron.state.optimizer import gradients_are_finite
from roll_async.trainer.megatron.state.optimizer_state import parameter_states, parts_of
from roll_async.trainer.protocol import GivenRows, ValueRows
from roll_async.weight_sync.bucket import Content
from tests.rounding import Bounds, assert_near

NUM_ROWS, WIDTH, VOCABULARY = 16, rank_side.WIDTH, 64

BOUNDS = Bounds(layers=4, hidden=64, inner=96, length=WIDTH, rows=NUM_ROWS)
"""What another layout's order of sums explains."""

MODELS = {
    "dense": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "dense, tied": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "MoE": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    ),
}


def model_folder(folder, kind, seed=0, vocabulary=VOCABULARY):
    """A random checkpoint of 4 layers whose biases and norms are not trivial."""
    import transformers

    family, fields = MODELS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=16,
        initializer_range=0.2,
        pad_token_id=None,
        max_position_embeddings=128,
        dtype="float32",
        **fields,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return str(folder)


def batch(num_rows=NUM_ROWS, seed=1, *, a_copy=False, folder=None):
    """Rows of the certificates, as many as these layouts share evenly; with images where the model of `folder` reads
    them.
    """
    reader = None if folder is None else rank_side.image_reader(folder)
    return rank_side.batch(VOCABULARY, num_rows, seed, a_copy=a_copy, reader=reader)


def settings_of(folder, *, parallel=None, optimizer=None, loss=None, **fields):
    """Settings of a trained role, fp32, 4 rows per micro-batch, one mini-batch.

    Adam turns rounding of tiny gradients into whole steps; the larger epsilon keeps a step a smooth function of them.
    """
    return MegatronSettings(
        model_folder=folder,
        parallel=ParallelSizes(**(parallel or {})),
        optimizer=OptimizerSettings(**{"learning_rate": 3e-3, "epsilon": 1e-6, **(optimizer or {})}),
        loss=LossSettings(**{"pg_variant": "ppo", "pg_options": PpoOptions(), **(loss or {})}),
        **{"dtype": "fp32", "micro_batch_rows": 4, "mini_batch_rows": NUM_ROWS, **fields},
    )


def measure(rank, world_size, port, settings, scale=1.0):
    """One layout: weights out, log-probs, two optimizer steps, log-probs again. Rank 0 reports. `scale`: of the
    advantages, hence of loss and gradient.
    """
    began = time.monotonic()
    worker = start_worker(rank, world_size, port, settings)
    rows, policy = batch(a_copy=True)
    policy = replace(policy, advantages=policy.advantages * scale, kept=torch.arange(NUM_ROWS) % 3 == 0)
    exported = {name: tensor.clone() for name, tensor in worker.export_named_tensors()}
    before = worker.compute_logprobs(rows)
    first = worker.update_policy(policy, 1)
    entropies = worker.entropies
    steps = [first, worker.update_policy(policy, 2)]
    after = worker.compute_logprobs(rows)
    base = worker.compute_base_logprobs(rows)
    trained = {name: tensor.clone() for name, tensor in worker.export_named_tensors()}
    parts = [(part.name, part.shape, part.cut, part.tensor.clone()) for part in worker.weight_parts()]
    worker.stop()
    if rank:
        return {"parts": parts}
    return {
        "parts": parts,
        "exported": exported,
        "before": before,
        "entropies": entropies,
        "steps": steps,
        "after": after,
        "base": base,
        "trained": trained,
        "seconds": time.monotonic() - began,
    }


def assert_same_steps(found, expected, *, routed=False):
    """What `measure` found in a layout is what one rank found: log-probs, two steps, log-probs again. `routed`: after
    a step a token may be where two experts are a rounding apart, and goes to the other one; one in a hundred may.
    """
    assert_near(found["before"], expected["before"], BOUNDS.forward)
    known = expected["entropies"].isfinite()
    assert known.any() and torch.equal(found["entropies"].isfinite(), known)
    assert_near(found["entropies"][known], expected["entropies"][known], BOUNDS.forward)
    moved = float((expected["after"] - expected["before"]).abs().max())
    after, wanted = found["after"].clone(), expected["after"]
    rerouted = (after - wanted).abs() > BOUNDS.moved * moved
    if routed and rerouted.sum() <= after.numel() // 100:
        after[rerouted] = wanted[rerouted]
    assert_near(after, wanted, BOUNDS.moved, of=moved)
    (mine, mine_next), (theirs, theirs_next) = found["steps"], expected["steps"]
    assert_near(mine["trainer/grad_norm"], theirs["trainer/grad_norm"], BOUNDS.step)
    assert_near(mine_next["trainer/grad_norm"], theirs_next["trainer/grad_norm"], BOUNDS.moved)
    # The power of one log-prob after a step.
    assert_near(mine_next["policy/ratio_max"], theirs_next["policy/ratio_max"], BOUNDS.moved * moved)
    assert_same_losses(found["steps"], expected["steps"])
    for mine, theirs in zip(found["steps"], expected["steps"], strict=True):
        assert_near(mine["policy/entropy"], theirs["policy/entropy"], BOUNDS.step)


def assert_same_losses(found, expected):
    """Of steps: means of advantages, whose size is 1 and whose sign is either, times ratios."""
    for mine, theirs in zip(found, expected, strict=True):
        assert_near(mine["trainer/loss"], theirs["trainer/loss"], BOUNDS.step, of=theirs["policy/ratio"])


def train_and_save(rank, world_size, port, settings, folder, *, background=False):
    """Two steps, a checkpoint, two steps more; what the last two report."""
    worker = start_worker(rank, world_size, port, settings)
    _, policy = batch()
    for step in (1, 2):
        worker.update_policy(policy, step)
    worker.save(folder, 2, b"state of the loop", background=background)
    after = [worker.update_policy(policy, step) for step in (3, 4)]
    worker.finish_save()
    worker.stop()
    return after


def save_at(rank, world_size, port, settings, folder):
    """A checkpoint of the role, of the actor after a step."""
    worker = start_worker(rank, world_size, port, settings)
    if not settings.with_value_head:
        worker.update_policy(batch()[1], 1)
    worker.save(folder, 1, b"")
    worker.stop()


def train_save_and_tell_state(rank, world_size, port, settings, folder):
    """Two steps and a checkpoint; the optimizer's whole state, parameter by parameter."""
    worker = start_worker(rank, world_size, port, settings)
    _, policy = batch()
    for step in (1, 2):
        worker.update_policy(policy, step)
    worker.save(folder, 2, b"state of the loop")
    state = _optimizer_state(worker)
    worker.stop()
    return state


def load_and_tell_state(rank, world_size, port, settings, folder):
    """The same after a checkpoint that maybe another layout wrote."""
    worker = start_worker(rank, world_size, port, settings)
    worker.load(folder)
    state = _optimizer_state(worker)
    worker.stop()
    return state


def _optimizer_state(worker):
    names = {id(parameter): name for name, parameter in worker._model.named_parameters()}
    return {
        (names[id(held.parameter)], kind): held.gathered(kind).clone()
        for held in parameter_states(worker._optimizer)
        for kind in held.names
    }


def load_and_train(rank, world_size, port, settings, folder):
    """The two steps after a checkpoint that maybe another layout wrote; or the message of the error."""
    worker = start_worker(rank, world_size, port, settings)
    _, policy = batch()
    try:
        state = worker.load(folder)
    except ValueError as error:
        worker.stop()
        return str(error)
    assert state == b"state of the loop"
    after = [worker.update_policy(policy, step) for step in (3, 4)]
    worker.stop()
    return after


def logprobs_after_resume(rank, world_size, port, settings, folder, *, forget_count=False):
    """Log-probs after the step that follows a checkpoint. `forget_count`: the optimizer does not know how many steps
    it has taken; its moments are those of the checkpoint all the same.
    """
    worker = start_worker(rank, world_size, port, settings)
    rows, policy = batch()
    worker.load(folder)
    if forget_count:
        for group in worker._optimizer.param_groups:
            del group["step"]
    worker.update_policy(policy, 3)
    found = worker.compute_logprobs(rows)
    worker.stop()
    return found[rows.mask] if rank == 0 else None


def save_and_export(rank, world_size, port, settings, folder, export):
    """One step, then the same weights as a checkpoint and as a Hugging Face folder."""
    worker = start_worker(rank, world_size, port, settings)
    worker.update_policy(batch()[1], 1)
    worker.save(folder, 1, b"")
    worker.export_hf(export)
    worker.stop()


def exchange_uneven(rank, world_size, port):
    """Parts of 1 and 3 rows, gathered and reduced, as NCCL would."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    group = torch.distributed.group.WORLD
    mine = torch.full((1 + 2 * rank, 2), float(rank + 1))
    parts = [torch.zeros(1, 2), torch.zeros(3, 2)]
    cpu_shim._gather_uneven(parts, mine, group=group)
    output = torch.zeros(1 + 2 * rank, 2)
    cpu_shim._reduce_scatter_uneven(output, [part * (rank + 1) for part in parts], group=group)
    torch.distributed.destroy_process_group()
    return [part.tolist() for part in parts], output.tolist()


def finite_by_all(rank, world_size, port, gradients):
    """What each rank says of gradients, of which it holds its own; the first rank trains nothing."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    buffers = [SimpleNamespace(grad_data=torch.tensor([1.0, gradients[rank]]))] if rank else []
    part = SimpleNamespace(parameters=lambda: iter([torch.zeros(1)]), buffers=buffers, expert_parallel_buffers=[])
    found = gradients_are_finite([part])
    torch.distributed.destroy_process_group()
    return found


def raises(rank, world_size, port, **given):
    """A rank whose layout does not work."""
    raise ZeroDivisionError("of a rank")


def scores_of_one_row(rank, world_size, port, settings):
    """(log-probs of one row alone, and of it among all), on rank 0."""
    worker = start_worker(rank, world_size, port, settings)
    rows, _ = batch()
    own = torch.arange(NUM_ROWS) == 1
    alone, among = worker.compute_logprobs(chosen_rows(rows, own)), worker.compute_logprobs(rows)
    worker.stop()
    return None if rank else (alone[0], among[1])


def routers_product(rank, world_size, port):
    """What Megatron's routers multiply with before layers are chosen, with dense layers, and with experts."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from tiny_families import joined

    from roll_async.checkpoint.hf_names.families import family_of
    from roll_async.trainer.megatron.model.layer_spec import LayerChoice, block_spec

    found = [vars(moe_utils).get("te_general_gemm", "unbound")]
    with joined(rank, world_size, port, {}):
        for experts in (None, 2):
            config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=experts)
            block_spec(config, family_of("Qwen3ForCausalLM"), layers=LayerChoice.LOCAL, rotation=None)
            found.append(vars(moe_utils).get("te_general_gemm", "unbound"))
    return tuple(found)


def cases_of_the_gpu_suite(rank, world_size, port, folder):
    """What cases of tools/gpu_cases.py report, on the CPU: those that need no process of their own."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
    import gpu_cases

    found = {}
    for name in ("moe", "resume", "offload", "engine"):
        (folder / name).mkdir()
        found[name] = gpu_cases.CASES[name]("cpu", str(folder / name))
    return found


def threads_after_stops(rank, world_size, port, settings, more_ports):
    """Threads of this process after each of three workers has come and gone."""
    counts = []
    gc.disable()  # with a large heap it comes by so seldom
    for each in (port, *more_ports):
        start_worker(rank, world_size, each, settings).stop()
        counts.append(len(os.listdir("/proc/self/task")))
    gc.enable()
    return counts


def replay(rank, world_size, port, settings, experts):
    """Log-probs and one optimizer step, where routers take `experts`; then log-probs where they choose themselves."""
    worker = start_worker(rank, world_size, port, settings)
    rows, policy = batch()
    before = worker.compute_logprobs(replace(rows, experts=experts))
    step = worker.update_policy(replace(policy, experts=experts), 1)
    after = worker.compute_logprobs(rows)
    worker.stop()
    return {"before": before, "step": step, "after": after} if rank == 0 else None


def score(rank, world_size, port, settings, rows):
    """Log-probs of given rows."""
    worker = start_worker(rank, world_size, port, settings)
    found = worker.compute_logprobs(rows)
    worker.stop()
    return found


def dropped_layers(rank, world_size, port, settings):
    """How far an adapted layer under dropout is from the one without, relative to the adapter's part: when
    scoring, in the mean of many draws, in one draw, and from the definition on the same draw.
    """
    from torch.nn.functional import dropout, linear

    worker = start_worker(rank, world_size, port, settings)
    found, layer = {}, worker._model.module.decoder.layers[0]
    with torch.no_grad():
        for name, part in (("column", layer.mlp.linear_fc1), ("row", layer.mlp.linear_fc2)):
            torch.manual_seed(1)
            part.adapter.up.copy_(torch.randn_like(part.adapter.up))
            x = torch.randn(
                8, 1, part.weight.shape[1], generator=torch.Generator().manual_seed(2 + rank * (name == "row"))
            )
            base, merged = part.weight, part.weight + part.adapter.delta()
            part.eval()
            plain = part(x)[0]
            part.adapter.on = False
            scale = (plain - part(x)[0]).abs().mean()
            part.adapter.on = True
            whole = linear(x, merged)
            if name == "row" and world_size > 1:
                torch.distributed.all_reduce(whole)
            gaps = {"scoring": (plain - whole).abs().mean() / scale}
            part.train()
            draws = [part(x)[0] for _ in range(400)]
            gaps["mean"] = (sum(draws) / len(draws) - plain).abs().mean() / scale
            gaps["one draw"] = (draws[0] - plain).abs().mean() / scale
            torch.manual_seed(3)
            drawn = part(x)[0]
            torch.manual_seed(3)
            by_hand = linear(x, base) + linear(dropout(x, settings.lora_dropout), part.adapter.delta())
            gaps["column, same draw"] = (drawn - by_hand).abs().mean() / scale if name == "column" else torch.zeros(())
            found[name] = {key: value.item() for key, value in gaps.items()}
    worker.stop()
    return found


def steps_from_host_memory(rank, world_size, port, settings):
    """Two steps as ever, and two where the optimizer's state moves away after each; whether it was away then."""
    found = {}
    for name in ("plain", "moved"):
        worker = start_worker(rank, world_size, port, settings)
        if name == "moved":
            # Moving is by device; two places of host memory are as far apart as one machine without another allows.
            worker._host_state = HostState(worker._optimizer, torch.device("cpu"))
        rows, policy = batch()
        found[name] = [worker.update_policy(policy, step)["trainer/loss"] for step in (1, 2)]
        found[name].append(worker.compute_logprobs(rows))
        if name == "moved":
            buffers = {buffer.data_ptr() for buffer in worker._host_state._buffers.values()}
            states = list(worker._host_state._tensors())
            found["tensors"] = len(states)
            found["away"] = all(tensor.data_ptr() in buffers for tensor in states)
        worker.stop()
        port += 1
    return found


def steps_between_phases(rank, world_size, port, settings):
    """Steps, log-probs, weights and optimizer state of a worker as ever, and of one that gives all its memory back
    after each call; what it reports and refuses meanwhile.
    """
    found = {}
    for name in ("plain", "moved"):
        worker = start_worker(rank, world_size, port, settings)
        rows, policy = batch()
        found[name] = []
        for step in (1, 2, 3):
            found[name].append(worker.update_policy(policy, step))
            if name == "moved":
                held = worker.offload_states(("gradients", "optimizer"))
                found.setdefault("partly", held)
                found.setdefault("pushed", {key: x.clone() for key, x in worker.export_named_tensors()})
                found["away"] = worker.offload_states()
                found["left"] = sum(x.untyped_storage().nbytes() for x in worker._model.chunks[0].parameters())
                found["refused"] = _message_of(worker.update_policy, policy, step)
                worker.load_states(("weights",))
                found["refused with weights"] = _message_of(worker.update_policy, policy, step)
            if name == "plain" and step == 1:
                found["expected push"] = {key: x.clone() for key, x in worker.export_named_tensors()}
            found[name].append(worker.compute_logprobs(rows))
            if name == "moved":
                found["back"] = worker.load_states()
        found[f"{name} state"] = _optimizer_state(worker)
        found[f"{name} weights"] = {key: x.clone() for key, x in worker.export_named_tensors()}
        worker.stop()
        port += 1
    return found


def _message_of(function, *arguments):
    """Of the RuntimeError that it raises."""
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)
    return None


def learned_by_adapters(rank, world_size, port, settings, steps, export=None, *, merge=False):
    """Of supervised steps: the size of the adapters relative to their weights, and by how much each token's log-prob
    rose. `merge`: layers multiply with W + delta in W's dtype, instead of adding the adapter's path. `export`: a
    folder for the weights.
    """
    worker = start_worker(rank, world_size, port, settings)
    rows, _ = batch()
    if merge:
        for module in worker._model.module.modules():
            if isinstance(module, Adapter):
                module.added_to_product = partial(_product_with_sum, module)
    before = worker.compute_logprobs(rows)
    for _ in range(steps):
        worker.supervised_update(rows.tokens, rows.lengths, rows.mask)
    rise = worker.compute_logprobs(rows) - before
    sizes = [
        float(module.adapter.delta().norm() / module.weight.float().norm())
        for module in worker._model.module.modules()
        if hasattr(module, "adapter")
    ]
    if export is not None:
        worker.export_hf(export)
    worker.stop()
    return sum(sizes) / len(sizes), rise[rows.mask]


def adapter_versions(rank, world_size, port, settings, versions):
    """Of each version what this rank sends, first everything and then adapters alone, and the log-probs of the rows."""
    worker = start_worker(rank, world_size, port, settings)
    rows, _ = batch()
    found = []
    for version in range(versions):
        for _ in range(3):
            worker.supervised_update(rows.tokens, rows.lengths, rows.mask)
        parts = worker.weight_parts(Content.ADAPTERS if version else Content.WHOLE)
        sent = [(part.name, part.shape, part.cut, part.tensor.clone()) for part in parts]
        found.append((sent, worker.compute_logprobs(rows)))
    worker.stop()
    return found


def _product_with_sum(adapter, x, weight, low):
    del low
    delta = adapter._scale * (adapter.up @ adapter.down)
    return x @ (weight + delta.to(weight.dtype)).t()


def state_bytes(rank, world_size, port, settings):
    """What a rank holds after a step."""
    worker = start_worker(rank, world_size, port, settings)
    rows, _ = batch()
    worker.supervised_update(rows.tokens.clamp(max=31), rows.lengths, rows.mask)
    memory = worker.load_states()
    worker.stop()
    return memory


def classes_of_layers(rank, world_size, port, settings):
    """Names of classes in the model, and of the optimizers that step."""
    worker = start_worker(rank, world_size, port, settings)
    layers = {type(module).__name__ for module in worker._model.module.modules()}
    optimizers = {type(part.optimizer).__name__ for part in parts_of(worker._optimizer)}
    worker.stop()
    return {"layers": layers, "optimizers": optimizers}


class LargestTensor(TorchDispatchMode):
    """Counts the numbers in the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.numel())
        return out


def logits_in_pieces(rank, world_size, port, settings, budget):
    """Log-probs and a step with logits of at most `budget` bytes; the largest tensor of each in numbers."""
    output_head.LOGITS_BYTES["cpu"] = budget
    worker = start_worker(rank, world_size, port, settings)
    rows, policy = batch()
    named = [sorted(chunk.state_dict()) for chunk in worker._model.chunks]
    with LargestTensor() as scoring:
        before = worker.compute_logprobs(rows)
    with LargestTensor() as training:
        step = worker.update_policy(policy, 1)
    after = worker.compute_logprobs(rows)
    assert [sorted(chunk.state_dict()) for chunk in worker._model.chunks] == named, "a step names nothing anew"
    worker.stop()
    return {"before": before, "step": step, "after": after, "largest": (scoring.numbers, training.numbers)}


def critic_values(rank, world_size, port, settings, folder=None):
    """What a critic says of the batch, after a checkpoint."""
    worker = start_worker(rank, world_size, port, settings)
    if folder is not None:
        worker.load(folder)
    values = worker.compute_values(batch(folder=settings.model_folder)[0])
    worker.stop()
    return values


def critic_export(rank, world_size, port, settings, folder, export):
    """Two steps of a critic; its values then, its checkpoint and its Hugging Face folder."""
    worker = start_worker(rank, world_size, port, settings)
    rows, policy = batch(folder=settings.model_folder)
    for step in (1, 2):
        worker.update_values(
            ValueRows(
                tokens=rows.tokens,
                lengths=rows.lengths,
                mask=rows.mask,
                old_values=torch.zeros(rows.tokens.shape),
                returns=policy.advantages,
                images=rows.images,
            ),
            step,
        )
    values = worker.compute_values(rows)
    worker.save(folder, 2, b"")
    worker.export_hf(export)
    worker.stop()
    return values


def sharded_logprobs(rank, world_size, port, logits, tokens, mask, settings):
    """Of each setting log-probs, entropies, the gradient of their weighted sum on this rank's part of the vocabulary,
    and squares.
    """
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    found, each = [], logits.shape[-1] // world_size * 4
    # With the unit matrix as its weights the head's logits are what goes into it.
    shard = torch.eye(logits.shape[-1]).chunk(world_size)[rank]
    head = SimpleNamespace(multiplied_with=shard, tp_group=torch.distributed.group.WORLD)
    asked = mask.flatten().nonzero()[:, 0]
    for sampling, positions in settings:
        whole = logits.clone().requires_grad_()
        result = output_head.logprobs_of_hidden(
            whole, head, tokens, asked, sampling, with_entropy=True, with_squares=True, budget=positions * each
        )
        (result.logprobs * 2 + result.entropy * 3).sum().backward()
        part = whole.grad.chunk(world_size, -1)[rank]
        found.append((result.logprobs.detach(), result.entropy.detach(), part, result.squares))
    torch.distributed.destroy_process_group()
    return found


def given_steps(rank, world_size, port, settings, preference=None, steps=3):
    """Metrics of optimizer steps on given rows; with a preference rows 2i and 2i + 1 are a pair."""
    worker = start_worker(rank, world_size, port, settings)
    rows, _ = batch(a_copy=True)
    reference = None
    if preference is not None:
        scored = worker.compute_logprobs(rows)  # rank 0 has the answers of all
        told = [None if scored is None else scored.sum(-1)]
        torch.distributed.broadcast_object_list(told)
        reference = told[0]
    given = GivenRows(
        tokens=rows.tokens, lengths=rows.lengths, mask=rows.mask, preference=preference, ref_logprobs=reference
    )
    share = worker.splitter.given(given)[worker.data_parallel_rank]
    found = [worker.update_given(share, step) for step in range(1, steps + 1)]
    worker.stop()
    return found


def steps_with_one_image(rank, world_size, port, settings):
    """Metrics of two steps on rows of which one has an image, and the names of tensors that they moved."""
    worker = start_worker(rank, world_size, port, settings)
    _, policy = batch(folder=settings.model_folder)
    # Image tokens of the other rows are text then. Of what is not clipped, that row has something to learn.
    images = tuple(seen if row == 1 else () for row, seen in enumerate(policy.images))
    policy = replace(policy, images=images, advantages=policy.advantages.abs())
    before = {name: tensor.clone() for name, tensor in worker.export_named_tensors()}
    steps = [worker.update_policy(policy, step) for step in (1, 2)]
    moved = {name for name, tensor in worker.export_named_tensors() if not torch.equal(tensor, before[name])}
    worker.stop()
    return steps, moved

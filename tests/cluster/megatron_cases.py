"""Tiny models and batches of the Megatron tests, and what one rank reports about a layout."""

import gc
import os
import time
from dataclasses import replace

import torch

from roll_async.algorithms.policy_loss_options import PpoOptions
from roll_async.trainer.megatron import cpu_shim
from roll_async.trainer.megatron.settings import LossSettings, MegatronSettings, OptimizerSettings, ParallelSizes
from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec
from roll_async.trainer.protocol import PolicyRows, TokenRows

NUM_ROWS, WIDTH, VOCABULARY = 16, 30, 64

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


def model_folder(folder, kind, seed=0):
    """A random checkpoint of 4 layers whose biases and norms are not trivial."""
    import transformers

    family, fields = MODELS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
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


def batch(num_rows=NUM_ROWS, seed=1):
    """Rows of different lengths with everything a PPO loss reads."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, WIDTH + 1, (num_rows,), generator=generator)
    tokens = torch.randint(1, VOCABULARY, (num_rows, WIDTH), generator=generator)
    positions = torch.arange(WIDTH)[None]
    tokens[positions >= lengths[:, None]] = 0
    mask = (positions < lengths[:, None]) & (positions >= 4)
    noise = torch.randn(num_rows, WIDTH, generator=generator)
    policy = PolicyRows(
        tokens=tokens,
        lengths=lengths,
        mask=mask,
        advantages=torch.randn(num_rows, 1, generator=generator).expand(-1, WIDTH).contiguous(),
        behaviour_logprobs=-3 + 0.1 * noise,
        proximal_logprobs=-3 + 0.05 * noise,
        correction_weights=None,
        scores=torch.ones(num_rows),
        version_lag=torch.ones(num_rows, WIDTH, dtype=torch.int64),
    )
    return TokenRows(tokens=tokens, lengths=lengths, mask=mask), policy


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


def start_worker(rank, world_size, port, settings):
    worker = MegatronWorker(
        RankSpec(
            rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port, device="cpu", timeout_s=300
        ),
        settings,
    )
    worker.start()
    return worker


def measure(rank, world_size, port, settings):
    """One layout: weights out, log-probs, two optimizer steps, log-probs again. Rank 0 reports."""
    began = time.monotonic()
    worker = start_worker(rank, world_size, port, settings)
    rows, policy = batch()
    exported = {name: tensor.clone() for name, tensor in worker.export_named_tensors()}
    before = worker.compute_logprobs(rows)
    steps = [worker.update_policy(policy, step) for step in (1, 2)]
    after = worker.compute_logprobs(rows)
    base = worker.compute_base_logprobs(rows)
    trained = {name: tensor.clone() for name, tensor in worker.export_named_tensors()}
    worker.stop()
    if rank:
        return None
    return {
        "exported": exported,
        "before": before,
        "steps": steps,
        "after": after,
        "base": base,
        "trained": trained,
        "seconds": time.monotonic() - began,
    }


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


def threads_after_stops(rank, world_size, port, settings):
    """Threads of this process after each of three workers has come and gone."""
    counts = []
    gc.disable()  # with a large heap it comes by so seldom
    for number in range(3):
        start_worker(rank, world_size, port + number, settings).stop()
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

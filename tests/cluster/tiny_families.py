"""The small models of every family's certificate, and what the ranks do with them."""

from contextlib import contextmanager

from roll_async.checkpoint.hf_names import families as hf_families
from roll_async.commands.certify import checks

FAMILIES = {name: (family, more) for family in hf_families.FAMILIES for name, more in family.tiny.items()}
MOE = tuple(name for name, (_, more) in FAMILIES.items() if any("experts" in key for key in more))


def save_tiny(name, folder):
    """Write the small model; returns the Transformers model."""
    return checks.save_tiny(FAMILIES[name][0], name, folder)


@contextmanager
def joined(rank, world_size, port, layout):
    """Settings of a role on this rank, inside the layout's process groups."""
    from roll_async.trainer.megatron import ranks
    from roll_async.trainer.megatron.settings import ParallelSizes

    parallel = ParallelSizes(**layout)
    spec = ranks.RankSpec(rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port, device="cpu")
    ranks.join(spec, parallel, 1)
    try:
        yield parallel
    finally:
        ranks.leave()


def build(folder, parallel):
    import torch

    from roll_async.trainer.megatron.model.model import HfBackedModel
    from roll_async.trainer.megatron.settings import MegatronSettings

    return HfBackedModel(
        MegatronSettings(model_folder=str(folder), dtype="fp32", parallel=parallel), torch.device("cpu")
    )


def reshard(rank, world_size, port, layout, hf, source, target):
    """Load a converted checkpoint into a model with other weights, and save it again as a run does.

    Returns the largest difference between what was loaded and what the HF folder gives.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from roll_async.trainer.megatron.state.torch_dist import TorchDistSave

    with joined(rank, world_size, port, layout) as parallel, torch.no_grad():
        module = build(hf, parallel).module
        wanted = {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(7.0)
        module.load_state_dict(dist_checkpointing.load(module.sharded_state_dict(), str(source)), strict=False)
        difference = max((module.state_dict()[name] - wanted[name]).abs().max().item() for name in wanted)
        if rank == 0:
            target.mkdir()
        dist.barrier()
        TorchDistSave(target, {"model": module.sharded_state_dict()}, background=False).finish()
    return difference


def logprobs_and_gradients(rank, world_size, port, settings, rows):
    """Log-probs of rows; this rank's parts of the gradients of their mean cross-entropy by HF names."""
    from roll_async.commands.certify.rank_side import start_worker
    from roll_async.trainer.megatron.state.weight_parts import hf_parts
    from roll_async.trainer.protocol import GivenRows

    worker = start_worker(rank, world_size, port, settings)
    found = worker.compute_logprobs(rows)
    given = GivenRows(tokens=rows.tokens, lengths=rows.lengths, mask=rows.mask)
    worker.update_given(worker.splitter.given(given)[worker.data_parallel_rank], 1)
    model, parts = worker._model, []
    for name, parameter in model.named_parameters():
        size = settings.parallel.tensor if model._sharded[name] else 1
        tensor_rank = rank % settings.parallel.tensor
        parts += hf_parts(model.match(name), parameter.main_grad.clone(), model.heads, rank=tensor_rank, size=size)
    worker.stop()
    return found, parts

"""What one rank of a layout reports about a small model: its weights, log-probs, two optimizer steps, a checkpoint.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll_async.checkpoint.folders.hf_folder import HfFolder
from roll_async.trainer.megatron.ranks import RankSpec
from roll_async.trainer.megatron.settings import MegatronSettings
from roll_async.trainer.megatron.shares import DataParallelShard
from roll_async.trainer.megatron.worker import MegatronWorker
from roll_async.trainer.protocol import PolicyRows, TokenRows

ROWS, WIDTH, PROMPT = 12, 30, 4
_TIMEOUT_S = 300.0


class WholeBatchWorker(MegatronWorker):
    """A rank that is handed whole batches, as its group is: takes its share; rank 0 has the answers of all."""

    entropies: Tensor | None = None
    """[k,T] of the kept rows of the last step."""
    measured: Mapping[str, float]
    """Metrics of the last step that are of the machine."""

    def compute_logprobs(self, rows: Any) -> Tensor | None:
        """[B,T] on rank 0."""
        return self._whole(rows, super().compute_logprobs)

    def compute_plain_logprobs(self, rows: Any) -> Tensor | None:
        """[B,T] on rank 0."""
        return self._whole(rows, super().compute_plain_logprobs)

    def compute_squares(self, rows: Any) -> Tensor | None:
        """[B,T] on rank 0."""
        return self._whole(rows, super().compute_squares)

    def compute_base_logprobs(self, rows: Any) -> Tensor | None:
        """[B,T] on rank 0."""
        return self._whole(rows, super().compute_base_logprobs)

    def compute_values(self, rows: Any) -> Tensor | None:
        """[B,T] on rank 0."""
        return self._whole(rows, super().compute_values)

    def update_policy(self, rows: Any, step: int) -> Any:
        """The metrics that repeat; those of the machine are in `measured`, entropies of kept rows in `entropies`."""
        share = self.splitter.policy(rows)[self.data_parallel_rank]
        metrics, found = super().update_policy(share, step)
        self.entropies = None
        if rows.kept is not None:
            self.entropies = self._merged(rows, share.numbers[share.rows.fields["kept"]], found, torch.nan)
        self.measured = {name: x for name, x in metrics.items() if "device" in name or name.startswith("memory/")}
        return {name: x for name, x in metrics.items() if name not in self.measured}

    def update_values(self, rows: Any, step: int) -> dict[str, float]:
        """A step of the critic."""
        return super().update_values(self.splitter.values(rows)[self.data_parallel_rank], step)

    def _whole(self, rows: Any, compute: Callable[[DataParallelShard], Tensor | None]) -> Tensor | None:
        share = self.splitter.scoring(rows)[self.data_parallel_rank]
        return self._merged(rows, share.numbers, compute(share))

    def _merged(self, rows: Any, of_rank: Tensor, answer: Tensor | None, beyond: float = 0.0) -> Tensor | None:
        gathered: list[Any] = [None if answer is None else (of_rank, answer)]
        if (size := dist.get_world_size()) > 1:
            gathered *= size
            dist.all_gather_object(gathered, gathered[0])
        whole = torch.full(rows.tokens.shape, torch.nan)  # a row that nobody answers for shows
        for numbers, found in filter(None, gathered):
            whole[numbers] = torch.nn.functional.pad(found, (0, whole.shape[1] - found.shape[1]), value=beyond)
        return whole if dist.get_rank() == 0 else None


def start_worker(rank: int, world_size: int, port: int, settings: MegatronSettings) -> WholeBatchWorker:
    """On the CPU."""
    spec = RankSpec(
        rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port, device="cpu", timeout_s=_TIMEOUT_S
    )
    worker = WholeBatchWorker(spec, settings)
    worker.start()
    return worker


def batch(
    vocabulary: int, num_rows: int = ROWS, seed: int = 1, *, a_copy: bool = False
) -> tuple[TokenRows, PolicyRows]:
    """Rows of different lengths: to be scored, and with what a policy loss reads. `a_copy`: the last has the tokens of
    the first, as samples of a group often have.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, WIDTH + 1, (num_rows,), generator=generator)
    tokens = torch.randint(1, vocabulary, (num_rows, WIDTH), generator=generator)
    if a_copy:
        lengths[-1], tokens[-1] = lengths[0], tokens[0]
    positions = torch.arange(WIDTH)[None]
    tokens[positions >= lengths[:, None]] = 0
    mask = (positions < lengths[:, None]) & (positions >= PROMPT)
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


@dataclass(frozen=True, kw_only=True)
class LayoutReport:
    """Of one layout, on rank 0. Log-probs are [B,T]."""

    unequal: tuple[str, ...]
    """Tensors of the export that are not those of the folder, and those that only one of both has."""
    before: Tensor
    grad_norm: float
    after: Tensor
    """After one step."""
    resumed: Tensor
    """After the checkpoint of one rank, and one step more."""


def measure(
    rank: int, world_size: int, port: int, settings: MegatronSettings, checkpoint: str, vocabulary: int
) -> LayoutReport | None:
    """Weights out, log-probs, a step, log-probs; then another step from the checkpoint of one rank, which makes it."""
    worker = start_worker(rank, world_size, port, settings)
    rows, policy = batch(vocabulary)
    exported = {name: tensor.clone() for name, tensor in worker.export_named_tensors()}
    before = worker.compute_logprobs(rows)
    grad_norm = worker.update_policy(policy, 1)["trainer/grad_norm"]
    after = worker.compute_logprobs(rows)
    if world_size == 1:
        worker.save(checkpoint, 1, b"")
    else:
        worker.load(checkpoint)
    worker.update_policy(policy, 2)
    resumed = worker.compute_logprobs(rows)
    worker.stop()
    if rank:
        return None
    assert before is not None and after is not None and resumed is not None, "rank 0 has the answers"
    return LayoutReport(
        unequal=_unequal(exported, settings.model_folder),
        before=before,
        grad_norm=grad_norm,
        after=after,
        resumed=resumed,
    )


def _unequal(exported: Mapping[str, Tensor], folder: str) -> tuple[str, ...]:
    source = HfFolder(folder)
    names = {*source.names(), *exported}
    return tuple(
        sorted(
            n for n in names if n not in source or n not in exported or not torch.equal(exported[n], source.tensor(n))
        )
    )


def train_adapters(
    rank: int, world_size: int, port: int, settings: MegatronSettings, folder: str, vocabulary: int
) -> Tensor | None:
    """[B,T] log-probs after a step of the adapters; the model with them in `folder`, they alone beside it."""
    worker = start_worker(rank, world_size, port, settings)
    rows, policy = batch(vocabulary)
    worker.update_policy(policy, 1)
    after = worker.compute_logprobs(rows)
    worker.export_hf(folder)
    worker.stop()
    return after if rank == 0 else None


def transformers_logprobs(folder: Path, vocabulary: int) -> Tensor:
    """[B,T], row by row; 0 outside of the mask."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    rows, _ = batch(vocabulary)
    found = torch.zeros(rows.tokens.shape)
    with torch.no_grad():
        for i, length in enumerate(rows.lengths.tolist()):
            tokens = rows.tokens[i : i + 1, :length]
            logprobs = model(tokens).logits.log_softmax(-1)[0, :-1]
            found[i, 1:length] = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
    return found.masked_fill(~rows.mask, 0.0)

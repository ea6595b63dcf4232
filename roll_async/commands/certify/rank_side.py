"""What one rank of a layout reports about a small model: its weights, log-probs, two optimizer steps, a checkpoint.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll_async.checkpoint.folders.hf_folder import HfFolder
from roll_async.checkpoint.transforms import to_hf
from roll_async.inference.hf.weights import saved_name
from roll_async.prompts.images import ImageReader
from roll_async.schema import Image
from roll_async.trainer.megatron.model.logits_probe import transformers_model
from roll_async.trainer.megatron.ranks import RankSpec
from roll_async.trainer.megatron.settings import MegatronSettings
from roll_async.trainer.megatron.shares import DataParallelShard
from roll_async.trainer.megatron.worker import MegatronWorker
from roll_async.trainer.protocol import GivenRows, PolicyRows, TokenRows

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

    def hf_gradients(self) -> dict[str, Tensor]:
        """What the last step was taken from, by HF names; of one rank that holds all."""
        model, found = self._model, {}
        for name, parameter in model.named_parameters():
            match = model.match(name)
            gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            found |= zip(match.hf_names, to_hf(match.row, gradient.clone(), model.heads), strict=True)
        return found

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


def image_reader(folder: str | Path) -> ImageReader | None:
    """Of a model that reads images."""
    return ImageReader(str(folder)) if "vision_config" in HfFolder(folder).config else None


def batch(
    vocabulary: int,
    num_rows: int = ROWS,
    seed: int = 1,
    *,
    a_copy: bool = False,
    reader: ImageReader | None = None,
    mixed: bool = False,
) -> tuple[TokenRows, PolicyRows]:
    """Rows of different lengths: to be scored, and with what a policy loss reads. `a_copy`: the last has the tokens of
    the first, as samples of a group often have. `reader`: two rows of three have images, of different sizes, some of
    them the same; `mixed`: with their patches in another order.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, WIDTH + 1, (num_rows,), generator=generator)
    tokens = torch.randint(1, vocabulary if reader is None else reader.token_id, (num_rows, WIDTH), generator=generator)
    if a_copy:
        lengths[-1], tokens[-1] = lengths[0], tokens[0]
    prompts, images = torch.full((num_rows,), PROMPT), ()
    if reader is not None:
        images = tuple(_images(row, reader, mixed) for row in range(num_rows))
        for row, seen in enumerate(images):
            for image in seen:
                tokens[row, prompts[row] : prompts[row] + image.num_tokens] = reader.token_id
                prompts[row] += image.num_tokens + 1
        lengths = lengths.maximum(prompts + 4)
    positions = torch.arange(WIDTH)[None]
    tokens[positions >= lengths[:, None]] = 0
    mask = (positions < lengths[:, None]) & (positions >= prompts[:, None])
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
        images=images,
    )
    return TokenRows(tokens=tokens, lengths=lengths, mask=mask, images=images), policy


def _images(row: int, reader: ImageReader, mixed: bool) -> tuple[Image, ...]:
    """Of every third row none, of the next one of 5 x 3 tokens, of the last two of 2 x 2 and of 1 x 3; half of the rows
    have those of the other half.
    """
    sides, found = ((), ((5, 3),), ((2, 2), (1, 3)))[row % 3], []
    for number, (height, width) in enumerate(sides):
        generator = torch.Generator().manual_seed(2 * (row % (ROWS // 2)) + number)
        tiles = torch.randint(256, (2 * height, 2 * width, 4, 4, 3), generator=generator, dtype=torch.uint8)
        if mixed:
            tiles = tiles.flip(0, 1)
        pixels, file = tiles.permute(0, 2, 1, 3, 4).reshape(8 * height, 8 * width, 3), io.BytesIO()
        import PIL.Image  # of the extra that models which read images need

        PIL.Image.fromarray(pixels.numpy()).save(file, "PNG")
        found.append(reader.image(file.getvalue()))
    return tuple(found)


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
    rows, policy = batch(vocabulary, reader=image_reader(settings.model_folder))
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
    rows, policy = batch(vocabulary, reader=image_reader(settings.model_folder))
    worker.update_policy(policy, 1)
    after = worker.compute_logprobs(rows)
    worker.export_hf(folder)
    worker.stop()
    return after if rank == 0 else None


def look(
    rank: int, world_size: int, port: int, settings: MegatronSettings, vocabulary: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """[B,T] log-probs with the patches of images in another order; gradients of the mean cross-entropy of the trained
    tokens by HF names.
    """
    worker = start_worker(rank, world_size, port, settings)
    reader = image_reader(settings.model_folder)
    mixed = worker.compute_logprobs(batch(vocabulary, reader=reader, mixed=True)[0])
    assert mixed is not None
    rows, _ = batch(vocabulary, reader=reader)
    given = GivenRows(tokens=rows.tokens, lengths=rows.lengths, mask=rows.mask, images=rows.images)
    worker.update_given(worker.splitter.given(given)[worker.data_parallel_rank], 1)
    gradients = worker.hf_gradients()
    worker.stop()
    return mixed, gradients


def transformers_logprobs(folder: Path, vocabulary: int, *, mixed: bool = False) -> Tensor:
    """[B,T], row by row; 0 outside of the mask."""
    with torch.no_grad():
        return _transformers_logprobs(folder, vocabulary, mixed)[1]


def transformers_gradients(folder: Path, vocabulary: int) -> dict[str, Tensor]:
    """Of the mean cross-entropy of the trained tokens, by names in the folder."""
    model, logprobs = _transformers_logprobs(folder, vocabulary)
    (-logprobs.sum() / (logprobs != 0).sum()).backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[saved_name(name)] = parameter.grad
    return found


def _transformers_logprobs(folder: Path, vocabulary: int, mixed: bool = False) -> tuple[torch.nn.Module, Tensor]:
    reader, model = image_reader(folder), transformers_model(folder)
    rows, _ = batch(vocabulary, reader=reader, mixed=mixed)
    found = []
    for i, length in enumerate(rows.lengths.tolist()):
        tokens, seen = rows.tokens[i : i + 1, :length], {}
        if reader is not None and rows.images[i]:
            pixels, grid = reader.pixels(rows.images[i])
            of_images = (tokens == reader.token_id).int()
            seen = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": of_images}
        logprobs = model(tokens, **seen).logits.log_softmax(-1)[0, :-1]
        picked = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
        found.append(torch.nn.functional.pad(picked, (1, WIDTH - length)))
    return model, torch.stack(found).masked_fill(~rows.mask, 0.0)

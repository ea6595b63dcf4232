"""Images in a continuous batch of Transformers, which knows texts alone: what stands in their tokens' places, and where
all tokens of their requests stand.

The vision tower runs outside of the batch, once for all samples of a prompt. A hook on the language model has the
tokens of all requests of a step one after another; the batch knows whose they are. Shape letters: N tokens of a step, T
of a request, I of its images, H hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingManager
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

from roll_async.prompts.images import image_reader, laid_out
from roll_async.schema import GenerateRequest, Image

_KEPT_IMAGES = 64
"""Samples of a prompt are asked for together, so what the tower says of an image is needed again soon or never."""

Shown = tuple[Tensor, Tensor, Tensor, int]
"""Of one request: [I,H] outputs of the vision tower; [T] which of them stands in the place of a token of the prompt, -1
where none does; [3,T] where the prompt's tokens stand; and how much farther than their number in the request those
stand that are sampled after it.
"""


class ImageFeeder:
    """Images of the requests that are shown. The hook runs in the thread of the generation loop."""

    def __init__(
        self,
        model,  # noqa: ANN001 (a Transformers model)
        folder: str,
        manager: Callable[[], ContinuousBatchingManager],
    ) -> None:
        """`folder`: of the model; `manager`: the one that runs it now."""
        self._model, self._folder, self._manager = model, folder, manager
        self._shown: dict[str, Shown] = {}
        self._tower, self._num_swaps = threading.Lock(), 0
        self._outputs: dict[tuple[int, Image], Tensor] = {}
        """By the number of swaps: what a thread still computes of weights that are replaced is found by nobody."""
        model.get_decoder().register_forward_pre_hook(self._step_begins, with_kwargs=True)

    def swapped(self) -> None:
        """Other weights are served from now on."""
        self._num_swaps += 1
        self._outputs = {}

    def seen(self, request: GenerateRequest) -> Shown:
        """The images of a request through the tower, with the weights now served. Raises ValueError for images that its
        prompt has no tokens for, and for those of another size than it has.
        """
        reader, num_swaps = image_reader(self._folder), self._num_swaps
        # And one token more: those that are sampled count on from there.
        tokens = torch.tensor([*request.prompt_token_ids, -1])
        axes, slots = laid_out(tokens, request.images, reader.token_id)
        with self._tower:  # whoever comes second finds what the first has computed
            outputs = torch.cat([self._output(image, num_swaps) for image in request.images])
        device = outputs.device
        beyond = int(axes[0, -1]) - len(request.prompt_token_ids)
        return outputs, slots[:-1].to(device), axes[:, :-1].to(device), beyond

    def _output(self, image: Image, num_swaps: int) -> Tensor:
        """[tokens of the image,H]."""
        kept = self._outputs
        found = kept.pop((num_swaps, image), None)
        if found is None:
            pixels, grid = image_reader(self._folder).pixels([image])
            device = next(self._model.parameters()).device
            with torch.inference_mode():
                shown = self._model.get_image_features(pixels.to(device), grid.to(device), return_dict=True)
                found = torch.cat(list(shown.pooler_output)).to(self._model.dtype)
            if device.type != "cpu":
                torch.cuda.synchronize()  # the manager computes on a separate stream
            if len(found) != image.num_tokens:
                raise ValueError(f"an image of {image.num_tokens} tokens in its prompt has {len(found)} in the model")
        kept[num_swaps, image] = found  # the newest are last
        while len(kept) > _KEPT_IMAGES:
            del kept[next(iter(kept))]
        return found

    def show(self, request_id: str, shown: Shown) -> None:
        """Call it before the request is added."""
        self._shown[request_id] = shown

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._shown.pop(request_id, None)

    def _step_begins(self, decoder: nn.Module, inputs: tuple, given: dict) -> tuple[tuple, dict] | None:
        """`inputs_embeds` [1,N,H] and `position_ids` [1,N] of a step, the latter as [3,1,N]."""
        if not self._shown or given.get("cache") is None:  # a pass outside of the batch
            return None
        batch = self._manager().batch_processor
        assert batch is not None and isinstance(batch.inputs_and_outputs, ContinuousBatchingIOs)
        embedded, positions = given["inputs_embeds"][0], given["position_ids"].expand(3, 1, -1).clone()
        start = 0
        for request in batch.inputs_and_outputs.requests_in_batch:
            count = request.query_length
            shown = self._shown.get(request.state.request_id)
            if shown is not None:
                outputs, slots, axes, beyond = shown
                # `position_offset` is already that of the next step. A request that lost its cache is read again from
                # its first token, what it has sampled included.
                first = request.state.position_offset - count
                end = start + min(count, max(0, len(slots) - first))
                if end > start:
                    taken = slots[first : first + end - start]
                    positions[:, 0, start:end] = axes[:, first : first + end - start]
                    embedded[start:end][taken >= 0] = outputs[taken[taken >= 0]]
                positions[:, 0, end : start + count] += beyond
            start += count
        return inputs, {**given, "position_ids": positions}

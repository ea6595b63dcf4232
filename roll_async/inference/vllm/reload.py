"""Takes pushed tensors into vLLM's live model: the first push as vLLM loads a checkpoint, later ones to the places that
the first one showed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from roll_async.inference.vllm.packed import pack, unpack
from roll_async.inference.vllm.places import WeightWritePlan, WriteRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


class Reload:
    """The model of one worker: `open`, `load` as often as tensors come, `close`. Requests must rest meanwhile."""

    def __init__(self, model: nn.Module, config: VllmConfig) -> None:
        self._model, self._config = model, config
        self._learns = not config.parallel_config.enable_eplb  # that moves experts between pushes
        self._places: WeightWritePlan | None = None
        self._recorder: WriteRecorder | None = None
        self.is_open = False

    @property
    def places_known(self) -> bool:
        """The next push is not looked up by vLLM."""
        return self._places is not None

    def _configured(self) -> AbstractContextManager[None]:
        """Kernels that are rebuilt for new weights (fp8, mixtures of experts) read vLLM's current configuration."""
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._config)

    def open(self) -> None:
        """From here on the model serves nothing until `close`."""
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        with self._configured():
            unpack(self._model)
            initialize_layerwise_reload(self._model)
        self.is_open = True
        if self._places is not None:
            self._places.begin()
        elif self._learns:
            self._recorder = WriteRecorder(self._model)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Whole tensors with their names in the checkpoint, in any order."""
        with self._configured():
            if self._places is not None:
                try:
                    self._places.load(tensors)
                except RuntimeError:
                    self._places = None  # the next attempt is loaded by vLLM
                    raise
            elif self._recorder is not None:
                with self._recorder:
                    self._model.load_weights(self._but_sinks(self._recorder.watched(tensors)))  # type: ignore[operator]
            else:
                self._model.load_weights(self._but_sinks(tensors))  # type: ignore[operator]

    def _but_sinks(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Those that vLLM loads. It copies attention sinks (gpt-oss) past the loader of their parameter, which during a
        reload is all that writes into the served one.
        """
        from vllm.distributed import get_tensor_model_parallel_rank

        own = dict(self._model.named_parameters())
        for name, tensor in tensors:
            if not name.endswith(".self_attn.sinks"):
                yield name, tensor
            # Another stage of a pipeline has the others.
            elif (sinks := own.get(name.replace(".self_attn.", ".attn."))) is not None:
                part = tensor.split(sinks.numel())[get_tensor_model_parallel_rank()]
                sinks.weight_loader(sinks, part)  # type: ignore[attr-defined]

    def close(self) -> list[str]:
        """Names of layers that lack tensors, and are arbitrary now; none = the model is what was loaded."""
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        missing = self._missing()
        self.is_open = False
        with self._configured():
            finalize_layerwise_reload(self._model, self._config.model_config)
            pack(self._model)
        # The places of an incomplete push would lack tensors of the next one.
        if self._recorder is not None and not missing:
            self._places = self._recorder.places()
            self._learns = self._places is not None  # what could not be repeated once is not recorded again
        self._recorder = None
        return missing

    def _missing(self) -> list[str]:
        if self._places is None:
            return self._waiting()
        incomplete = self._places.incomplete
        return [name for name, layer in self._model.named_modules() if layer in incomplete]

    def _waiting(self) -> list[str]:
        """Layers for which vLLM waits. Vocabulary layers are padded and never fill; a tied head gets no tensor."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        tied = self._config.model_config.hf_config.get_text_config().tie_word_embeddings
        waiting = []
        for name, layer in self._model.named_modules():
            info = get_layerwise_info(layer)
            if not info.load_numel_total or not list(layer.parameters(recurse=False)):
                continue
            padded = isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0
            if not padded and not (tied and isinstance(layer, ParallelLMHead)):
                waiting.append(name)
        return waiting

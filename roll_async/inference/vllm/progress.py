"""What requests have generated so far, read from vLLM's front end.

Requests run with FINAL_ONLY: nothing is put together for them before their end. The front end holds the tokens anyway,
in the state of each request, where they cost nothing until somebody looks. These are names inside of vLLM, as of 0.32;
a release without them reports no progress, and only the death of an engine costs more then.
"""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING

from roll_async.inference.engine import Tokens
from roll_async.schema import WeightVersion, cut_runs

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

logger = logging.getLogger(__name__)


class ProgressReader:
    """Of one AsyncLLM, on the event loop of its caller."""

    def __init__(self, llm: AsyncLLM, *, labelled: bool) -> None:
        """`labelled`: vLLM knows the weight version of every token."""
        self._llm, self._labelled = llm, labelled
        self._works = True

    def read(self, internal_id: str, start: int, held_back: int, version: WeightVersion) -> Tokens | None:
        """The tokens from `start` on but for the last `held_back` ones, and the last one always; None when there are
        none, or when vLLM does not run the request. `internal_id`: vLLM's own for it. `version`: of tokens without a
        label.
        """
        if not self._works:
            return None
        try:
            state = self._llm.output_processor.request_states.get(internal_id)
            if state is None:
                return None
            return _part(state, start, held_back, version, labelled=self._labelled)
        except (AttributeError, TypeError) as error:
            self._works = False
            logger.warning("this vLLM does not tell what running requests have generated: %s", error)
            return None


def _part(state: RequestState, start: int, held_back: int, version: WeightVersion, *, labelled: bool) -> Tokens | None:
    """The number of tokens is read first: a thread may add one meanwhile, whose label comes before it."""
    tokens, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs.logprobs  # type: ignore[union-attr]
    known = min(len(tokens), len(logprobs))
    # The last one may end the request: the thread adds it first, and takes the request out after that. A request that
    # went on from there on another replica would answer beyond its end.
    end = known - max(held_back, 1)
    if end <= start:
        return None
    labels = [(int(label), first) for label, first in state.weight_version_starts] if labelled else []
    versions = [(label, first) for label, first in labels if first < known] or [(version, 0)]
    ends = [first for _, first in versions[1:]] + [known]
    runs = tuple((v, last - first) for (v, first), last in zip(versions, ends, strict=True))
    return Tokens(array("i", tokens[start:end]), array("f", logprobs[start:end]), cut_runs(runs, start, end))

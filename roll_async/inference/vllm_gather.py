"""Tokens of a request from many steps as one output.

vLLM's front end handles every token of every request by itself: right for text that is streamed. Here a request is
asked for once, at its end, so most of that work is spent on outputs nobody looks at, on the event loop and under the
interpreter lock that the next step needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.outputs import LogprobsLists

_LONGEST_S = 0.1
"""How long a token is held at most: what `Engine.progress` can report lies no further back than that and a step."""


@dataclass(slots=True)
class _Held:
    """What the front end was not told yet of one request."""

    first: EngineCoreOutput | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsLists] = field(default_factory=list)


class OutputGatherer:
    """Between a core and its front end, in the thread of the core."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._held: dict[str, _Held] = {}
        self._version: str | None = None
        self._clock, self._told_s = clock, clock()

    def expect(self, request: EngineCoreRequest) -> None:
        """Gather this one, if nobody looks at single tokens: stop strings are found in the front end."""
        sampling = request.sampling_params
        if sampling is not None and sampling.output_kind is RequestOutputKind.FINAL_ONLY and not sampling.stop:
            self._held[request.request_id] = _Held()

    def forget(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def take(self, outputs: EngineCoreOutputs) -> list[EngineCoreOutputs]:
        """What the front end has to hear now, in order. The tokens of one output have one weight version."""
        before, self._version = self._version, outputs.weight_version
        earlier = self._everything() if self._version != before or self._clock() >= self._told_s + _LONGEST_S else []
        now = [output for output in map(self._one, outputs.outputs) if output is not None]
        told = [EngineCoreOutputs(outputs=earlier, weight_version=before)] if earlier else []
        if now or outputs.scheduler_stats is not None or outputs.utility_output is not None:
            outputs.outputs = now
            told.append(outputs)
        return told

    def _one(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        held = self._held.get(output.request_id)
        if held is None:
            return output
        if output.finish_reason is not None:
            del self._held[output.request_id]
            return _merged(held, output)
        if held.first is None:
            held.first = output
        held.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            held.logprobs.append(output.new_logprobs)
        return None

    def _everything(self) -> list[EngineCoreOutput]:
        self._told_s = self._clock()
        merged = []
        for request_id, held in self._held.items():
            if held.first is not None:
                merged.append(_merged(held, None))
                self._held[request_id] = _Held()
        return merged


def _merged(held: _Held, last: EngineCoreOutput | None) -> EngineCoreOutput:
    """`last`: the output that ends the request; without it the request goes on."""
    if held.first is None:
        assert last is not None
        return last
    if last is None:
        last = held.first
    else:
        held.token_ids += last.new_token_ids
        if last.new_logprobs is not None:
            held.logprobs.append(last.new_logprobs)
        last.prefill_stats = last.prefill_stats or held.first.prefill_stats
    last.new_token_ids = held.token_ids
    if len(held.logprobs) > 1:
        ids, values, ranks, _ = zip(*held.logprobs, strict=True)
        last.new_logprobs = LogprobsLists(np.concatenate(ids), np.concatenate(values), np.concatenate(ranks))
    elif held.logprobs:
        last.new_logprobs = held.logprobs[0]
    return last

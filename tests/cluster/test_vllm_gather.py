"""What vLLM's front end hears through the gatherer is what the core said, in fewer pieces."""

from types import SimpleNamespace

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from roll_async.inference.vllm_gather import _LONGEST_S, OutputGatherer


def expect(gatherer, request_id, *, stop=(), kind=RequestOutputKind.FINAL_ONLY):
    sampling = SimpleNamespace(output_kind=kind, stop=list(stop))
    gatherer.expect(SimpleNamespace(request_id=request_id, sampling_params=sampling))


def token(request_id, value, finish_reason=None):
    """One sampled token; its log-prob is minus its id."""
    row = np.array([[value]])
    logprobs = LogprobsLists(row, -row.astype(np.float32), np.array([value % 7]))
    return EngineCoreOutput(request_id, [value], new_logprobs=logprobs, finish_reason=finish_reason)


def step(version, *outputs):
    return EngineCoreOutputs(outputs=list(outputs), weight_version=version)


class FrontEnd:
    """Remembers what it is told: (token, log-prob, rank, version) by request, and the ends."""

    def __init__(self):
        self.tokens, self.ends, self.num_outputs = {}, {}, 0

    def hear(self, told):
        for outputs in told:
            for output in outputs.outputs:
                assert output.request_id not in self.ends, "nothing comes after the end"
                self.num_outputs += 1
                heard = self.tokens.setdefault(output.request_id, [])
                if output.new_token_ids:
                    ids, values, ranks, _ = output.new_logprobs
                    assert list(ids[:, 0]) == output.new_token_ids
                    heard += [
                        (t, float(v), int(r), outputs.weight_version)
                        for t, v, r in zip(output.new_token_ids, values[:, 0], ranks, strict=True)
                    ]
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output.finish_reason


STEPS = st.lists(
    st.tuples(
        st.booleans(),  # new weights before it
        st.sampled_from([0.01, 0.1, 1.0]),  # seconds it takes
        st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None] * 12 + ["stop", "abort"])), max_size=5),
    ),
    max_size=150,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, streamed=st.integers(0, 4))
def test_every_token_arrives_once_in_order_with_its_own_logprob_and_weight_version(steps, streamed):
    now_s, sampled_s = 0.0, {}
    gatherer, heard, said = OutputGatherer(lambda: now_s), FrontEnd(), FrontEnd()
    for number in range(5):
        expect(gatherer, str(number), stop=["x"] if number == streamed else [])
    version = value = 0
    for new_weights, seconds, events in steps:
        version += new_weights
        now_s += seconds
        outputs, seen = [], set()
        for number, end in events:
            request_id = str(number)
            if request_id in said.ends or request_id in seen:
                continue
            seen.add(request_id)
            value += 1
            sampled_s[value] = now_s
            reason = {None: None, "stop": FinishReason.STOP, "abort": FinishReason.ABORT}[end]
            outputs.append(EngineCoreOutput(request_id, [], finish_reason=reason) if end == "abort" else
                           token(request_id, value, reason))  # fmt: skip
        said.hear([step(str(version), *outputs)])
        heard.hear(gatherer.take(step(str(version), *outputs)))
        for request_id, tokens in said.tokens.items():
            known = heard.tokens.get(request_id, [])
            assert known == tokens[: len(known)], "in order, nothing twice"
            assert all(now_s - sampled_s[t] <= _LONGEST_S for t, *_ in tokens[len(known) :]), "none is held for long"
            if request_id in said.ends or request_id == str(streamed):
                assert known == tokens
    assert heard.ends == said.ends


def test_an_answer_is_told_in_one_piece_if_nobody_looks_at_its_tokens():
    gatherer, heard = OutputGatherer(lambda: 0.0), FrontEnd()
    expect(gatherer, "a")
    for value in range(20):
        heard.hear(gatherer.take(step("0", token("a", value))))
    assert heard.num_outputs == 0
    heard.hear(gatherer.take(step("0", token("a", 20, FinishReason.STOP))))
    assert heard.num_outputs == 1 and len(heard.tokens["a"]) == 21


@pytest.mark.parametrize("changes", [{"stop": ["end"]}, {"kind": RequestOutputKind.CUMULATIVE}])
def test_who_needs_single_tokens_gets_them(changes):
    gatherer, heard = OutputGatherer(lambda: 0.0), FrontEnd()
    expect(gatherer, "a", **changes)
    for value in range(5):
        heard.hear(gatherer.take(step("0", token("a", value))))
    assert heard.num_outputs == 5


def test_nothing_is_kept_of_a_request_that_was_forgotten():
    gatherer, heard = OutputGatherer(lambda: 0.0), FrontEnd()
    expect(gatherer, "a")
    heard.hear(gatherer.take(step("0", token("a", 1))))
    gatherer.forget("a")
    heard.hear(gatherer.take(step("1", token("b", 2))))
    assert list(heard.tokens) == ["b"]

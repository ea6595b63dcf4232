"""What is the same for every engine."""

import asyncio
from array import array
from dataclasses import replace

import pytest

from roll_async.inference.engine import first_of, held_back, token_budget
from roll_async.inference.settings import EngineSettings
from roll_async.schema import GenerateRequest, SamplingParams
from tests.patience import patient

SETTINGS = EngineSettings(model_folder="m", dtype="fp32", device="cpu", max_model_len=8)


def a_request(num_prompt_tokens=5, **sampling):
    sampling = SamplingParams(**{"max_new_tokens": 100, **sampling})
    return GenerateRequest(request_id="r", prompt_token_ids=array("i", range(num_prompt_tokens)), sampling=sampling)


def test_a_response_gets_what_it_asks_for_or_what_the_prompt_leaves():
    assert token_budget(a_request(max_new_tokens=2), SETTINGS) == 2
    assert token_budget(a_request(), SETTINGS) == 3 and token_budget(a_request(7), SETTINGS) == 1
    with pytest.raises(ValueError, match="request r: 8 prompt tokens leave no room in a context of 8"):
        token_budget(a_request(8), SETTINGS)


def test_tokens_that_may_begin_a_stop_string_are_held_back():
    stops = replace(SETTINGS, stop_strings=True)
    assert held_back(a_request(), SETTINGS) == 0
    assert held_back(a_request(stop_strings=("ab", "\u00e9nd")), stops) == 3
    with pytest.raises(ValueError, match="request r has stop_strings"):
        held_back(a_request(stop_strings=("ab",)), SETTINGS)


def test_the_first_event_ends_the_wait_and_leaves_no_task():
    async def run():
        first, second = asyncio.Event(), asyncio.Event()
        waiting = asyncio.ensure_future(first_of(first, second))
        await asyncio.sleep(0)
        second.set()
        await asyncio.wait_for(waiting, patient(1))
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_request_without_a_token_to_read_or_to_write_is_refused():
    for request in (a_request(0), a_request(max_new_tokens=0), a_request(max_new_tokens=-5)):
        with pytest.raises(ValueError, match="request r: .* expected one of each at least"):
            token_budget(request, SETTINGS)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": -1}, {"temperature": 1e-300},
        {"temperature": 1e300}, {"top_p": 0}, {"top_p": 1.1}, {"top_p": float("nan")}, {"top_k": -2}, {"top_k": 10**30},
        {"repetition_penalty": 0}, {"repetition_penalty": float("nan")}, {"repetition_penalty": float("inf")},
        {"stop_strings": ("a", "")},
    ],
    ids=repr,
)  # fmt: skip
def test_sampling_parameters_that_would_spoil_an_engine_are_refused_where_they_are_made(values):
    with pytest.raises(ValueError, match=f"{next(iter(values))}: expected"):
        a_request(**values)
    assert a_request(temperature=0) and a_request(temperature=1e-4) and a_request(top_p=1e-9)

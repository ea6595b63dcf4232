"""The gateway on a real engine: an `openai` client's loop, and the log-probs checked against the model itself."""

import asyncio
import json
from array import array
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest

from roll_async.agents.gateway.server import PolicyGateway
from roll_async.agents.policies import OneEnginePolicy
from roll_async.agents.rendering import TemplateRenderer
from roll_async.agents.session import Session, SessionOptions
from roll_async.schema import GenerateRequest, Outcome, Reward, SamplingParams


class Recording(OneEnginePolicy):
    """Remembers what the engine sampled, as the engine told it."""

    sampled: list

    async def generate(self, request, **more):
        completion = await super().generate(request, **more)
        self.sampled.append((request.prompt_token_ids, completion.token_ids, completion.logprobs))
        return completion


@pytest.mark.slow
def test_an_unmodified_openai_client_is_trained_on_exactly_what_the_engine_sampled(tiny_model, exact):
    openai = pytest.importorskip("openai")
    torch = pytest.importorskip("torch")
    from roll_async.inference.backends import create_engine
    from roll_async.inference.settings import EngineSettings

    folder, model, tokenizer = tiny_model
    settings = EngineSettings(model_folder=folder, dtype="fp32", device="cpu", max_model_len=400, max_running=4)

    async def work():
        engine = create_engine("hf_infer", settings)
        await engine.start()
        policy = Recording(engine.generate)
        policy.sampled = []
        with ThreadPoolExecutor(1) as executor:
            options = SessionOptions(sampling=SamplingParams(max_new_tokens=12), max_turns=8, max_context=400)
            session = Session("t", policy, TemplateRenderer(tokenizer), options, executor)
            gateway = PolicyGateway()
            await gateway.start()
            endpoint = gateway.open(session)
            messages = [{"role": "user", "content": "hello"}]
            try:
                async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
                    for number in range(4):
                        reply = await client.chat.completions.create(model="policy", messages=messages)
                        said = reply.choices[0].message
                        messages += [said.model_dump(exclude_none=True), {"role": "user", "content": f"and {number}?"}]
                    messages[1] = {"role": "assistant", "content": "rewritten"}
                    await client.chat.completions.create(model="policy", messages=messages)
            finally:
                await gateway.close()
                await engine.close()
        return session, policy

    session, policy = asyncio.run(work())
    assert dict(session.tree.branches) == {"history": 1}
    rows = exact(session, policy)
    assert [row.num_turns for row in rows] == [4, 1]
    for row in session.tree.rows("t", reward=Reward(score=1.0), outcome=Outcome.SOLVED):
        ids = torch.tensor([*row.prompt_token_ids, *row.response_token_ids])[None]
        with torch.no_grad():
            logprobs = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        first = len(row.prompt_token_ids) - 1
        for place, trained in enumerate(row.loss_mask):
            if trained:
                assert abs(float(logprobs[first + place]) - row.behaviour_logprobs[place]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_request_spoils_an_engine_for_the_others(tiny_model, dtype):
    from roll_async.inference.backends import create_engine
    from roll_async.inference.settings import EngineSettings

    folder, _, tokenizer = tiny_model
    faults = ["NaN", "1e400", "-1", "1e300"]
    extremes = [
        {"temperature": 1e-4},
        {"temperature": 1e-300},
        {"temperature": 2},
        {"temperature": 0},
        {"top_p": 1e-9},
        {"top_k": 1},
    ]
    extremes += [{"top_k": 0}, {"top_k": 10**7}, {"max_tokens": 10**30}]
    settings = EngineSettings(
        model_folder=folder, dtype=dtype, device="cpu", max_model_len=400, max_running=4, truncated_sampling=True
    )

    async def work():
        engine = create_engine("hf_infer", settings)
        await engine.start()
        options = SessionOptions(
            sampling=SamplingParams(max_new_tokens=4), max_turns=100, max_context=400, client_sampling=True
        )
        session = Session("t", OneEnginePolicy(engine.generate), TemplateRenderer(tokenizer), options)
        gateway = PolicyGateway()
        await gateway.start()
        endpoint = gateway.open(session)
        headers = {"authorization": f"Bearer {endpoint.api_key}"}
        try:
            async with aiohttp.ClientSession(headers=headers) as http:

                async def status(body):
                    async with http.post(f"{endpoint.base_url}/chat/completions", data=body) as response:
                        return response.status

                chat = '{"messages": [{"role": "user", "content": "hello"}], '
                for fault in faults:
                    assert await status(f'{chat} "temperature": {fault}}}') == 400
                assert await status(f'{chat} "top_k": {10**30}}}') == 400
                assert await status(f'{chat} "stop": ["b"]}}') == 400, "this engine finds no stop strings"
                for extreme in extremes:
                    assert await status(chat + json.dumps(extreme)[1:]) == 200, extreme
                request = GenerateRequest(request_id="r", prompt_token_ids=array("i"), sampling=options.sampling)
                with pytest.raises(ValueError, match="0 prompt tokens"):
                    await engine.generate(request)
                assert await status(chat + '"temperature": 1}') == 200
        finally:
            await gateway.close()
            await engine.close()

    asyncio.run(work())

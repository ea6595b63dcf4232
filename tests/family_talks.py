"""Conversations with a policy whose turns are given, rendered and continued as those of agents are."""

import asyncio
from array import array

from roll_async.agents.messages import Message, TurnRequest
from roll_async.agents.rendering import TemplateRenderer
from roll_async.agents.session import Session, SessionOptions
from roll_async.schema import Completion, FinishReason, SamplingParams
from tests.family_tokenizers import make_family

AFTER_USER = {
    "glm-4": "<|user|>",
    "glm-4.5": "<|user|>",
    "llama-3": "<|eot_id|>",
    "llama-3.1": "<|eot_id|>",
    "qwen-3": "<|im_end|>",
    "gemma": "<end_of_turn>",
    "deepseek-r1": "<｜end▁of▁sentence｜>",
    "cohere-2": "<|END_OF_TURN_TOKEN|>",
    "phi-3": "<|end|>",
    "llama-2": "</s>",
}
"""What a model of the family samples at the end of a turn after which its user speaks."""
FIRST = {"glm-4": "\n", "glm-4.5": "\n<think></think>\n", "llama-2": " "}
"""What a model of the family samples before an answer without a thought."""
LAST = {"cohere-2": "<|END_RESPONSE|>", "llama-2": " "}
"""And after it, before the mark."""


class Sampled:
    """A policy that samples these (text, mark); no mark: it was cut."""

    def __init__(self, tokenizer, turns):
        self._tokenizer, self._turns, self.requests = tokenizer, list(turns), []

    async def generate(self, request, *, conversation, validation):
        self.requests.append(request)
        text, mark = self._turns.pop(0)
        ids = array("i", self._tokenizer.encode(text, add_special_tokens=False))
        if mark:
            ids.append(self._tokenizer.convert_tokens_to_ids(mark))
        return Completion(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=array("f", bytes(4 * len(ids))),
            version_runs=((0, len(ids)),) if ids else (),
            finish_reason=FinishReason.STOP if mark else FinishReason.LENGTH,
            generation_s=0.1,
        )


def talk(name, turns, follow_ups, tokenizer=None, tools=()):
    """What the policy was asked for, as text; the replies; the session."""
    tokenizer = tokenizer or make_family(name)
    policy = Sampled(tokenizer, turns)
    options = SessionOptions(sampling=SamplingParams(max_new_tokens=500), max_turns=20, max_context=9000)
    session = Session("t", policy, TemplateRenderer(tokenizer), options)

    async def work():
        messages, replies = [Message(role="user", content="q1")], []
        for follow_up in [*follow_ups, None]:
            reply = await session.turn(TurnRequest(messages=tuple(messages), tools=tuple(tools)))
            replies.append(reply)
            messages += [reply.message, *([] if follow_up is None else follow_up)]
        return replies

    replies = asyncio.run(work())
    asked = [tokenizer.decode(list(request.prompt_token_ids)) for request in policy.requests]
    return asked, replies, session


def user(text):
    return [Message(role="user", content=text)]


def tool(text):
    return [Message(role="tool", content=text, call_id="call_0")]

"""Turns of a model behind an OpenAI-compatible API, for evaluation and for data: nothing is trained from them.

    agent --any dialect--> PolicyGateway --> RemoteTurns --chat completions--> the remote
                                                 +--> a record of each turn, with tokens where the remote gives them

Servers differ in the fields that they take. A field that a remote refuses by its name is left out from then on; what it
does not give is null in the record. The key is sent to the remote and nowhere else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

from roll_async.agents.gateway import chat
from roll_async.agents.messages import TurnReply, TurnRequest
from roll_async.agents.turn_handler import BadRequest, TurnHandler
from roll_async.observe.outside import OutsideError, border
from roll_async.prompts.tool_calls import write

logger = logging.getLogger(__name__)

Json = Mapping[str, object]
_WISHES = {"logprobs": True, "return_token_ids": True}
"""The first is of the API, the second of vLLM."""
_MAY_COME_BACK = (408, 409, 425, 429)
_LONGEST_REASON = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOptions:
    """A model of a remote API, and how it is asked."""

    base_url: str
    """With /v1."""
    model: str
    """Its name there."""
    key: str = field(default="", repr=False)
    """Empty = the remote wants none."""
    max_new_tokens: int = 512
    """Tokens of a turn at most."""
    temperature: float | None = None
    """Of requests that set none; None = the remote's own."""
    timeout_s: float = 600.0
    """Of one turn; the clients of such APIs wait as long."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if "@" in parts.netloc:
            raise ValueError("a key inside the address would stand in logs; name an environment variable with it")
        if parts.scheme not in ("http", "https") or not self.host:
            raise ValueError(f"{self.base_url!r} is no address; write it like https://host/v1")

    @property
    def host(self) -> str:
        """Of the address."""
        return urlsplit(self.base_url).hostname or ""

    @property
    def encrypted(self) -> bool:
        """Whether nobody on the way reads what is sent."""
        return urlsplit(self.base_url).scheme == "https"


class RemoteModel:
    """The client of one remote, shared by all trajectories. Close it."""

    def __init__(self, options: RemoteOptions) -> None:
        self.options = options
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=options.timeout_s))
        self._refused: set[str] = set()
        self._limit = "max_tokens"

    async def close(self) -> None:
        """End its connections."""
        await self._http.close()

    async def ask(self, request: TurnRequest) -> tuple[Json, Json]:
        """(what was sent, the answer) of one turn. Raises BadRequest for what the remote refuses for good, RuntimeError
        for what may be tried again.
        """
        # Each round has one field less, or another name for one: there are three at most.
        while True:
            body = self._body(request)
            status, text = await self._post(body)
            if status == 200:
                return body, _parsed(text)
            # Refusals of a field: 400 of OpenAI, 422 of servers that check bodies by a schema.
            if status not in (400, 422) or not self._does_without(body, text):
                raise self._refusal(status, text)

    def _body(self, request: TurnRequest) -> dict[str, object]:
        options = self.options
        temperature = options.temperature if request.temperature is None else request.temperature
        wanted: dict[str, object] = {
            "model": options.model,
            "messages": [chat.written(message) for message in request.messages],
            self._limit: min(options.max_new_tokens, request.max_tokens or options.max_new_tokens),
            "tools": list(request.tools) or None,
            "temperature": temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop": list(request.stop) or None,
            **{name: value for name, value in _WISHES.items() if name not in self._refused},
        }
        return {name: value for name, value in wanted.items() if value is not None}

    def _does_without(self, body: Json, reason: str) -> bool:
        """Whether the refusal names a field of this body that later ones leave out, or name otherwise."""
        for name in _WISHES:
            # Known already, for a request that was under way when another one learned it.
            if name in body and name in reason:
                if name not in self._refused:
                    logger.info("the remote takes no %s: records are without it", name)
                self._refused.add(name)
                return True
        if "max_tokens" in body and "max_completion_tokens" in reason:
            self._limit = "max_completion_tokens"
            return True
        return False

    async def _post(self, body: Json) -> tuple[int, str]:
        options = self.options
        headers = {"authorization": f"Bearer {options.key}"} if options.key else {}
        url = f"{options.base_url.rstrip('/')}/chat/completions"
        try:
            # A redirect could carry the key to another host.
            async with self._http.post(url, json=body, headers=headers, allow_redirects=False) as reply:
                return reply.status, await reply.text()
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            # Not chained: the text of the cause may hold the key.
            raise RuntimeError(self._without_key(f"the remote: {type(error).__name__}: {error}")) from None

    def _refusal(self, status: int, text: str) -> Exception:
        try:
            told = json.loads(text)["error"]
            text = str(told["message"] if isinstance(told, dict) else told)
        except (ValueError, KeyError, TypeError):
            pass  # its own words, then
        said = self._without_key(f"the remote answered {status}: {text}")[:_LONGEST_REASON]
        return RuntimeError(said) if status >= 500 or status in _MAY_COME_BACK else BadRequest(said)

    def _without_key(self, text: str) -> str:
        return text.replace(self.options.key, "***") if self.options.key else text


class RemoteTurns(TurnHandler):
    """One trajectory. Its turns are numbered in the order in which they were answered."""

    def __init__(self, name: str, model: RemoteModel, tell: Callable[[Json], None]) -> None:
        """`tell` gets the record of every turn."""
        super().__init__(name, max_turns=1 << 30, max_seconds=float("inf"))
        self._model, self._tell, self._answered = model, tell, 0

    async def _sample_turn(self, request: TurnRequest, started_s: float) -> TurnReply:
        body, answer = await self._model.ask(request)
        try:
            with border(RuntimeError):  # the answer may hold anything
                reply, record = _reply(answer, f"{self.name}+{self._answered}"), _record(body, answer)
        except OutsideError as error:
            raise RuntimeError(f"the remote's answer: {error}") from error
        self._tell({"trajectory": self.name, "turn": self._answered, **record})
        self._answered += 1
        return reply


def _parsed(text: str) -> Json:
    """Raises RuntimeError for an answer without a message."""
    try:
        answer = json.loads(text)
        if isinstance(answer["choices"][0]["message"], dict):
            return answer
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        pass
    raise RuntimeError(f"the remote's answer is no chat completion: {text[:200]!r}")


def _reply(answer: Json, name: str) -> TurnReply:
    choice = answer["choices"][0]  # type: ignore[index]
    usage = answer.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    try:
        said = chat.message({"role": "assistant", **choice["message"]})
    except BadRequest as error:
        raise RuntimeError(f"the remote's answer: {error}") from error
    finish = choice.get("finish_reason")
    return TurnReply(
        reply_id=name,
        text=write(said.content, said.tool_calls),
        content=said.content,
        tool_calls=said.tool_calls,
        finish_reason=finish if finish in ("length", "tool_calls") else "stop",
        prompt_tokens=int(counts.get("prompt_tokens") or 0),
        completion_tokens=int(counts.get("completion_tokens") or 0),
    )


def _record(body: Json, answer: Json) -> dict[str, object]:
    """What was asked, and the answer with its tokens; log-probs that are not one per token are not kept."""
    choice = answer["choices"][0]  # type: ignore[index]
    ids, told = choice.get("token_ids"), choice.get("logprobs")
    content = told.get("content") if isinstance(told, dict) else None
    items: Sequence[Json] | None = content if isinstance(content, list) else None
    if ids is not None and items is not None and len(ids) != len(items):
        logger.warning("the remote gave %d tokens and %d log-probs for a turn; neither is kept", len(ids), len(items))
        ids = items = None
    asked = (
        "model",
        "messages",
        "tools",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "max_tokens",
        "max_completion_tokens",
    )
    return {
        **{name: body[name] for name in asked if name in body},
        "message": choice["message"],
        "finish_reason": choice.get("finish_reason"),
        "usage": answer.get("usage"),
        "prompt_token_ids": answer.get("prompt_token_ids"),
        "token_ids": ids,
        "tokens": None if items is None else [item.get("token") for item in items],
        "logprobs": None if items is None else [item.get("logprob") for item in items],
    }

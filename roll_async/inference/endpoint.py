"""A model behind an OpenAI-compatible address: one chat in, one answer out; or tokens in, their log-probs out.

    start --GET--> /models (is it there, and which model)
    chat --POST--> /chat/completions ; echo --POST--> /completions

A chat is only for measuring: the text comes back, not its tokens, log-probs or weight version.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from roll_async.config.schema_worker import TeacherServer
from roll_async.observe.thoughts import THINK
from roll_async.rewards.serving.http_calls import BUSY, Backoff, Trouble
from roll_async.schema import FinishReason, SamplingParams

if TYPE_CHECKING:
    import aiohttp

_BACKOFF = Backoff(first_s=1.0, longest_s=20.0)


class Refused(ValueError):
    """The server does not take this one request: another attempt would bring the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointOptions:
    """One address."""

    url: str
    """http://HOST:PORT, with or without the version: `/v1` is added where there is no path."""
    model: str | None = None
    """None = the only one that the server lists."""
    key_env: str | None = None
    """Environment variable that holds the key; None = none is sent."""
    timeout_s: float = 600.0
    """One request, what it waits in the server included."""
    max_concurrent: int = 64
    """Requests at the same time; further ones wait here."""
    max_retries: int = 3
    """Further attempts of a request that the server was too busy for."""
    key_name: str = "--key-env"
    """What says `key_env`, for messages."""

    @classmethod
    def of(cls, server: TeacherServer) -> EndpointOptions:
        """A distillation teacher, as the config has it."""
        return cls(
            url=server.address,
            model=server.model,
            key_env=server.api_key_env,
            timeout_s=server.timeout,
            max_concurrent=server.max_concurrent,
            max_retries=server.max_retries,
            key_name="api_key_env",
        )

    @property
    def base(self) -> str:
        """The address to which `/chat/completions` is appended."""
        whole = self.url.rstrip("/")
        return whole if urlsplit(whole).path else f"{whole}/v1"


class ChatEndpoint:
    """Client of one address. `start` before use, `close` at the end."""

    def __init__(self, options: EndpointOptions) -> None:
        self._options, self.model = options, options.model or ""
        self._slots = asyncio.Semaphore(options.max_concurrent)
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Raises ConnectionError when nothing answers there, ValueError for a key that is missing or refused and for a
        model that is not there or has to be chosen.
        """
        import aiohttp

        options, headers = self._options, {}
        if options.key_env is not None:
            if not (key := os.environ.get(options.key_env)):
                raise ValueError(f"{options.key_name} {options.key_env}: that environment variable is not set")
            headers["Authorization"] = f"Bearer {key}"
        self._http = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=options.timeout_s),
            connector=aiohttp.TCPConnector(limit=0),  # `chat` and `echo` have slots
        )
        status, text = await self._call("GET", "models", None)
        if status in (401, 403):
            holds = f"{options.key_name} names the variable that holds it"
            raise ValueError(f"{options.url} refuses the key ({status}); {holds}")
        # A server without /models can be measured all the same, where --model names the model.
        served = _served(text) if status == 200 else []
        if not self.model:
            if len(served) != 1:
                there = f"it serves {', '.join(served)}" if served else f"/models answers {status}"
                raise ValueError(f"{options.url}: which model? {there}; name one with --model or teachers.NAME.model")
            self.model = served[0]
        elif served and self.model not in served:
            raise ValueError(f"{options.url}: there is no model {self.model}; it serves {', '.join(served)}")

    async def close(self) -> None:
        """End the connections."""
        if self._http is not None:
            await self._http.close()

    async def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        sampling: SamplingParams,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> tuple[str, FinishReason]:
        """The answer. `template_kwargs`: variables of the server's chat template. Raises Refused for a request that the
        server does not take, ConnectionError when it does not answer after all attempts.
        """
        body: dict[str, object] = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.stop_strings:
            body["stop"] = list(sampling.stop_strings)
        if sampling.top_k > 0:  # these are not in OpenAI's own interface
            body["top_k"] = sampling.top_k
        if template_kwargs:
            body["chat_template_kwargs"] = dict(template_kwargs)
        if sampling.repetition_penalty != 1:
            body["repetition_penalty"] = sampling.repetition_penalty
        return _answer(await self._asked("chat/completions", body))

    async def echo(self, token_ids: Sequence[int]) -> tuple[str, array]:
        """(text of the tokens, and what the server goes on with; float32 [n - 1] log-prob of every token except the
        first, given those before it, at temperature 1). Raises as `chat`.
        """
        # One token more than is wanted: there are servers that take no request for none.
        asked = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        reply = await self._asked("completions", {"model": self.model, "prompt": list(token_ids), **asked})
        return _echoed(reply, len(token_ids))

    async def _asked(self, path: str, body: Mapping[str, object]) -> str:
        """The reply to a request, with its attempts."""

        async def attempt() -> tuple[int, str] | Trouble:
            status, text = await self._call("POST", path, body)
            return Trouble(reason=f"{status} {text[:200]}") if status in BUSY else (status, text)

        # Held over the retries: while one request waits for a busy server no further one goes there.
        async with self._slots:
            reply = await _BACKOFF.answer(attempt, self._options.max_retries)
        if isinstance(reply, list):
            raise ConnectionError(f"{self._options.url} is too busy or broken: {reply[-1].reason}")
        status, text = reply
        if status != 200:
            raise Refused(f"{self._options.url} refuses a request: {status} {text[:200]}")
        return text

    async def _call(self, method: str, path: str, body: object | None) -> tuple[int, str]:
        import aiohttp

        assert self._http is not None, "start first"
        address = f"{self._options.base}/{path}"
        try:
            async with self._http.request(method, address, json=body) as response:
                return response.status, await response.text(errors="replace")  # a proxy's error page need not be UTF-8
        # The order matters: aiohttp's time-outs and InvalidURL are ClientErrors, too.
        except TimeoutError as error:
            raise ConnectionError(f"{address}: no answer within {self._options.timeout_s:g} s") from error
        except (aiohttp.InvalidURL, ValueError) as error:
            raise ValueError(f"{self._options.url} is no address; expected http://HOST:PORT/v1") from error
        except aiohttp.ClientError as error:
            raise ConnectionError(f"nothing answers at {address} ({error}); is the server up?") from error


def _served(text: str) -> list[str]:
    """Names of the models of a `/models` reply; none in a reply of another form."""
    try:
        return [str(model["id"]) for model in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def _answer(text: str) -> tuple[str, FinishReason]:
    try:
        (choice,) = json.loads(text)["choices"]
        message = choice["message"]
        content = str(message.get("content") or "")  # null where the answer is a tool call
        # A server that reads thoughts itself gives them beside the answer, under the one or the other name.
        if thought := message.get("reasoning_content") or message.get("reasoning"):
            content = THINK[0].written(str(thought), content)
        return content, FinishReason.LENGTH if choice["finish_reason"] == "length" else FinishReason.STOP
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"no chat completion in {text[:200]!r} ({type(error).__name__})") from error


def _echoed(text: str, num_tokens: int) -> tuple[str, array]:
    try:
        (choice,) = json.loads(text)["choices"]
        found = array("f", choice["logprobs"]["token_logprobs"][1:num_tokens])  # of the first there is none
        said = str(choice.get("text") or "")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"no log-probs of the prompt (echo) in {text[:200]!r} ({type(error).__name__})") from error
    if len(found) != num_tokens - 1 or not all(map(math.isfinite, found)):
        raise Refused(f"{len(found) + 1} log-probs for {num_tokens} tokens, or some that are not finite")
    return said, found

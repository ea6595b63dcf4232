"""A chat completions server that answers as it is told, and bodies for it."""

import inspect
from contextlib import asynccontextmanager

from aiohttp import web

KEY = "sk-very-secret"


def answer(message, finish="stop", **choice):
    choices = [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, **choice}]
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    return {"id": "x", "object": "chat.completion", "model": "there", "choices": choices, "usage": usage}


class Remote:
    """A chat completions server that answers as it is told: bodies, or (status, text)."""

    def __init__(self, answers):
        self.answers, self.bodies, self.keys = list(answers), [], []

    async def handle(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        found = self.answers.pop(0)
        found = found(body) if callable(found) else found
        found = await found if inspect.isawaitable(found) else found
        if isinstance(found, tuple):
            headers = {"location": "http://127.0.0.1:9/v1/chat/completions"} if found[0] == 307 else {}
            return web.Response(status=found[0], text=found[1], headers=headers)
        return web.json_response(found)


@asynccontextmanager
async def listening(remote):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", remote.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def chat(*messages, **more):
    return {"model": "policy", "messages": [{"role": r, "content": c} for r, c in messages], **more}

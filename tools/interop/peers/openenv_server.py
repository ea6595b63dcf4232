"""Plays an OpenEnv environment for `env_type: http_agent`: python openenv_server.py PORT ENVIRONMENT_URL

The environment is the one that OpenEnv's own `openenv init` writes, behind its own server; it is spoken to by OpenEnv's
own client over a WebSocket. It gives more for longer messages. The policy is spoken to by the plain `openai` client.
"""

import sys

import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI
from openenv.core.generic_client import GenericEnvClient

TURNS = 3
app = FastAPI()


@app.post("/")
async def run(body: dict):
    """One episode of three steps."""
    reward, said = 0.0, []
    async with (
        GenericEnvClient(base_url=sys.argv[2]) as env,
        AsyncOpenAI(base_url=body["base_url"], api_key=body["api_key"]) as client,
    ):
        step = await env.reset(seed=body["task"]["seed"])
        for _ in range(TURNS):
            said.append({"role": "user", "content": step.observation["echoed_message"]})
            reply = await client.chat.completions.create(model=body["model"], messages=said)
            message = reply.choices[0].message
            said.append(message.model_dump(exclude_none=True))
            step = await env.step({"message": message.content or ""})
            reward += step.reward or 0.0
    return {"reward": reward / TURNS}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")

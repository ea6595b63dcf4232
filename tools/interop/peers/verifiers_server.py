"""Runs episodes of a verifiers environment for `env_type: http_agent`: python verifiers_server.py PORT"""

import itertools
import os
import sys

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


def main():
    """Serve until killed."""
    config = {"taskset": {"id": "verifiers_calculator"}, "agent": {"runtime": {"type": "subprocess"}}}
    env, numbers = load_environment(resolve_env_config(config)), itertools.count()

    async def run(request):
        body = await request.json()
        variable = f"PEER_KEY_{next(numbers)}"  # verifiers takes keys from the environment
        os.environ[variable] = body["api_key"]
        client = vf.EvalClientConfig(base_url=body["base_url"], api_key_var=variable)
        context = vf.ModelContext(model=body["model"], client=client)
        episode = await env.run_episode(env.taskset.task(body["task"]["seed"]), context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            return web.Response(status=500, text="; ".join(f"{e.type}: {e.message}" for e in errors)[:2000])
        (trace,) = episode.traces
        return web.json_response({"reward": trace.reward, "metrics": {"verifiers_turns": trace.num_turns}})

    async def serving(app):
        async with env.serving():
            yield

    app = web.Application()
    app.router.add_post("/", run)
    app.cleanup_ctx.append(serving)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()

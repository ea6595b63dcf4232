"""The Hugging Face engine, which writes down what it samples, in its own process, before anything else sees it."""

import json
import os

from roll_async.inference.hf.engine import HfEngine


class RecordingEngine(HfEngine):
    """Appends a line per request to the file that ROLL_INTEROP_RECORD names."""

    async def generate(self, request):
        """As the engine does."""
        completion = await super().generate(request)
        row = {
            "request": request.request_id,
            "prompt": list(request.prompt_token_ids),
            "tokens": list(completion.token_ids),
            "logprobs": [round(value, 6) for value in completion.logprobs],
            "versions": [list(run) for run in completion.version_runs],
        }
        with open(os.environ["ROLL_INTEROP_RECORD"], "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return completion

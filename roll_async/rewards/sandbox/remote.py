"""Runs programs in a sandbox service that speaks SandboxFusion's `POST /run_code` (bytedance/SandboxFusion; verl uses
the same call).
"""

from __future__ import annotations

import http.client
import inspect
import json
import secrets
import time
import urllib.error
import urllib.request

from roll_async.rewards.sandbox.prelude import BEFORE, OWN_NAMES_SOURCE, with_prelude
from roll_async.rewards.sandbox.protocol import ProgramResult, ProgramRun
from roll_async.rewards.sandbox.values import encode

_TRIES = 4
_FIRST_PAUSE_S = 0.25
_GRACE_S = 20.0
"""Beyond the program's own time limit: queue of the service, compilation, network."""
_CALL = """

def _roll_async_call():
    import json
    name, arguments = json.loads({request!r})
    names = own_names(globals(), globals().get("_roll_async_before", {{}}))
    function = names.get(name) or getattr(names["Solution"](), name)
    def plain(value):
        return repr(value)
    print({word!r} + json.dumps(function(*arguments), default=plain))
_roll_async_call()
"""


class RemoteSandbox:
    """`Runner` over HTTP. A service that is down, busy or broken is a ConnectionError, after retries with backoff."""

    def __init__(self, api_url: str) -> None:
        self._url = api_url if api_url.rstrip("/").endswith("/run_code") else f"{api_url.rstrip('/')}/run_code"

    def run(self, run: ProgramRun) -> ProgramResult:
        """Raises ConnectionError when the service does not work, RuntimeError when it refuses the request."""
        word = secrets.token_hex(16)
        answer = self._post(
            {
                "language": "pytest" if run.kind == "pytest" else "python",
                "code": _program(run, word),
                "stdin": run.stdin,
                "run_timeout": run.timeout_s,
                "compile_timeout": run.timeout_s,
                "memory_limit_MB": run.memory_mb,
            },
            run.timeout_s + _GRACE_S,
        )
        ran = answer.get("run_result")
        if answer.get("status") == "SandboxError" or not isinstance(ran, dict):
            raise ConnectionError(f"{self._url}: {answer.get('message') or answer.get('status')}")
        return _outcome(run, ran, word)

    def close(self) -> None:
        """Nothing stays open between runs."""

    def _post(self, body: dict[str, object], timeout_s: float) -> dict[str, object]:
        headers, problem = {"Content-Type": "application/json"}, ""
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=timeout_s) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}: {error.read()[:200].decode(errors='replace')}"
                if error.code != 429 and error.code < 500:
                    raise RuntimeError(f"{self._url}: {problem}") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = f"{type(error).__name__} {error}"
        raise ConnectionError(f"{self._url}: {problem}, {_TRIES} times")


def _program(run: ProgramRun, word: str) -> str:
    """One file: the service runs no harness of ours, so what it would do stands behind the program."""
    code = with_prelude(run.code) if run.prelude else run.code
    match run.kind:
        case "call":
            call = _CALL.format(request=json.dumps([run.function, run.arguments]), word=word)
            return f"{code}\n\n{OWN_NAMES_SOURCE}{call}"
        case "assert" | "values":
            own = f"{OWN_NAMES_SOURCE}\nnames = own_names(globals(), globals().get({BEFORE!r}, {{}}))\n"
            test = f"{run.setup}\n{run.test}"
            values = f"[encode(eval(e, names)) for e in {run.expressions!r}]" if run.kind == "values" else "1"
            tail = f"exec({test!r}, names)\nimport json\nprint({word!r} + json.dumps({values}))"
            return f"{code}\n\n{inspect.getsource(encode)}\n\n{own}{tail}\n"
        case "pytest":
            imports = ("from solution import", "import solution")
            lines = [line for line in run.test.splitlines() if not line.strip().startswith(imports)]
            return code + "\n\n" + "\n".join(lines)
    return code


def _outcome(run: ProgramRun, ran: dict, word: str) -> ProgramResult:
    stdout, status = str(ran.get("stdout") or ""), int(ran.get("return_code") or 0)
    result: dict[str, object] | None = None
    if run.kind == "pytest":
        result = {"passed": int(status == 0), "total": 1}
        status = 0 if status == 1 else status  # 1 = tests failed, which is a result
    elif run.kind in ("call", "values", "assert"):
        stdout, found, reported = stdout.rpartition(word)
        if found and run.kind in ("call", "values"):
            try:
                # The first line: what a program prints at its exit stands behind it.
                result = {"value" if run.kind == "call" else "values": json.loads(reported.splitlines()[0])}
            except (ValueError, IndexError, RecursionError):
                pass  # no result
        elif found:
            result = {"passed": 1, "total": 1}
    late = ran.get("status") == "TimeLimitExceeded"
    return ProgramResult(
        ending="timeout" if late else "exit",
        status=status,
        stdout=stdout,
        stderr=str(ran.get("stderr") or ""),
        result=result,
        seconds=float(ran.get("execution_time") or run.timeout_s),
    )

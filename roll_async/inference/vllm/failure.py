"""Why an engine did not start, and that it is dead.

vLLM reports of its processes only that one of them failed, and logs the cause there: the log of errors of all of them
is gathered in a file while they start.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roll_async.inference.backends import MemoryMoved
from roll_async.weight_sync.errors import EngineDead

# What its processes say of it are an AssertionError and a ValueError like any other: only their words tell them.
_MEMORY_MOVED = ("Error in memory profiling", "Free memory on device")
_PATH = "VLLM_LOGGING_CONFIG_PATH"
_ERROR_LINE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Died)(?::|$)")


@contextmanager
def start_errors() -> Iterator[None]:
    """Around the start of vLLM, before it is imported. Raises RuntimeError with the first exception that one of its
    processes logged; without one (it was killed), with what vLLM says of it. MemoryMoved where that is why.
    """
    given = os.environ.get(_PATH)
    with tempfile.TemporaryDirectory(prefix="vllm-start-") as folder:
        log, config = Path(folder) / "errors.log", Path(folder) / "logging.json"
        config.write_text(json.dumps(_logging(log)))
        os.environ[_PATH] = str(config)
        try:
            yield
        except (RuntimeError, OSError, AssertionError) as error:  # a ValueError is for the user to fix
            logged = first_exception(log.read_text(errors="replace")) if log.is_file() else None
            told = f"vLLM did not start: {logged or f'{type(error).__name__}: {error}'}"
            kind = MemoryMoved if any(words in told for words in _MEMORY_MOVED) else RuntimeError
            raise kind(told) from error
        finally:
            if given is None:
                del os.environ[_PATH]
            else:
                os.environ[_PATH] = given


@contextmanager
def core_alive() -> Iterator[None]:
    """Around calls of vLLM. Raises EngineDead when its core has ended, as every call after that."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDead(f"vLLM's engine process is dead: {error}") from error


def first_exception(log: str) -> str | None:
    """The last line of the first traceback in a log, with the lines that belong to it (at most 12)."""
    lines = log.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback ")]
    for index in range(starts[0], len(lines)) if starts else ():
        if _ERROR_LINE.match(lines[index]):
            rest = lines[index : index + 12]
            end = next((i for i, line in enumerate(rest) if i and (not line or line.startswith("Traceback "))), None)
            return "\n".join(rest[:end])
    return None


def _logging(log: Path) -> dict[str, object]:
    """Errors to the console, as without it, and to the file. Processes open it at once: it is gone when they have
    started, and opening it at a later error would be an error itself, which ends a worker.
    """
    handlers = {
        "console": {"class": "logging.StreamHandler", "level": "ERROR", "stream": "ext://sys.stdout"},
        "file": {"class": "logging.FileHandler", "level": "ERROR", "filename": str(log)},
    }
    loggers = {"vllm": {"handlers": list(handlers), "level": "ERROR", "propagate": False}}
    return {"version": 1, "disable_existing_loggers": False, "handlers": handlers, "loggers": loggers}

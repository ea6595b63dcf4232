"""Why an engine did not start.

vLLM reports of its processes only that one of them failed, and logs the cause there: the log of errors of all of them
is gathered in a file while they start.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from types import TracebackType

_PATH = "VLLM_LOGGING_CONFIG_PATH"
_ERROR_LINE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Died)(?::|$)")


class StartErrors:
    """Around the start of vLLM, before it is imported: `cause` says what its processes logged first."""

    def __enter__(self) -> StartErrors:
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-start-")
        self._log = Path(self._folder.name) / "errors.log"
        self._given = os.environ.get(_PATH)
        config = Path(self._folder.name) / "logging.json"
        config.write_text(json.dumps(_logging(self._log)))
        os.environ[_PATH] = str(config)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._given is None:
            del os.environ[_PATH]
        else:
            os.environ[_PATH] = self._given
        self._folder.cleanup()

    def cause(self) -> str | None:
        """The first exception that a process logged, None when they logged none (it was killed)."""
        if not self._log.is_file():
            return None
        return first_exception(self._log.read_text(errors="replace"))


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

"""The sandbox host: a small clean process that forks one confined child per program.

    reward worker (holds the expected answers) --JSON lines--> host (clean environment) --fork--> child (the program)

The child sees neither the environment of the run nor the expected answers: the host never had them. It gives up its
rights (`confine.py`) before the first byte of the program is compiled. The host watches time, output, disk and threads,
kills, and reports. Run as `python -m roll_async.rewards.sandbox.host PARENT_PID`; it ends with its input.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

from roll_async.rewards.sandbox.confine import Confinement, confine, die_with_parent, missing
from roll_async.rewards.sandbox.harness import run_program
from roll_async.rewards.sandbox.prelude import import_modules
from roll_async.rewards.sandbox.protocol import Ending, ProgramResult, ProgramRun

_OUTCOME_FIELDS = [field.name for field in fields(ProgramResult)]
_OUTPUT_BYTES = 4 << 20  # of each stream, and of the result
_STDERR_BYTES = 16 << 10  # of its end, which says what was raised
_FILE_BYTES = 16 << 20  # of one file
_DISK_BYTES = 64 << 20  # of all files
_DISK_ENTRIES = 1000
_OPEN_FILES = 64
_THREADS = 128
_TICK_S = 0.05  # between two looks at the limits
_MAX_DEPTH = 200
"""Of what a program returns, brackets within brackets."""
_PREFIX = "roll_async_sandbox_"


def main() -> None:
    """Serve until the input ends."""
    # Ctrl-C reaches the whole group; the run ends this process itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print must not come between the answers
    _sweep()
    base = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}_"))
    import_modules()
    # A collection in a child would write to every page that it shares with this process.
    gc.freeze()
    print("{}", file=answers)  # ready: the parent waits for a first line
    try:
        for line in sys.stdin:
            outcome = run_confined(ProgramRun(**json.loads(line)), base)
            print(json.dumps({name: getattr(outcome, name) for name in _OUTCOME_FIELDS}), file=answers)
    finally:
        _remove(base)


def run_confined(run: ProgramRun, base: Path) -> ProgramResult:
    """Fork, confine, run, watch, clean up."""
    scratch = Path(tempfile.mkdtemp(dir=base))
    pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, result
    # A file, since a pipe would have to be fed while the program runs.
    with tempfile.TemporaryFile(dir=base) as stdin:
        stdin.write(run.stdin.encode(errors="replace"))
        stdin.flush()
        stdin.seek(0)
        host, word = os.getpid(), secrets.token_hex(8)
        child = os.fork()
        if child == 0:
            _become_program(run, scratch, [stdin.fileno(), *(write for _, write in pipes)], host, word)
    for _, write in pipes:
        os.close(write)
    try:
        return _watch(child, [read for read, _ in pipes], run, scratch, word)
    finally:
        for read, _ in pipes:
            os.close(read)
        _remove(scratch)


def _become_program(run: ProgramRun, scratch: Path, fds: list[int], host: int, word: str) -> None:
    """In the child; never returns."""
    try:
        os.setsid()  # a group of its own, for `_kill_group`
        die_with_parent(host)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Copies first: one of the numbers 0 to 3 may be a source that is still to come.
        for target, fd in enumerate([os.dup(fd) for fd in fds]):
            os.dup2(fd, target)
        os.closerange(4, 1024)  # 3 is the result
        os.chdir(scratch)
        os.environ.clear()
        os.environ.update(HOME=str(scratch), TMPDIR=str(scratch), PATH="/usr/bin:/bin", LANG="C.UTF-8")
        os.environ.update(OMP_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
        tempfile.tempdir = str(scratch)  # the module remembers the host's
        confine(
            Confinement(
                read=(),
                write=(str(scratch),),
                cpu_s=int(run.timeout_s) + 2,  # the kernel counts whole seconds, of all threads together
                memory_bytes=run.memory_mb << 20,
                file_bytes=_FILE_BYTES,
                open_files=_OPEN_FILES,
            )
        )
        status = run_program(run, result_fd=3, word=word)
    except BaseException as error:  # nothing of the host may go on in the child
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
        status = 70
    os._exit(status)


def _watch(child: int, reads: list[int], run: ProgramRun, scratch: Path, word: str) -> ProgramResult:
    """Collect what the program writes until it ends or a limit ends it."""
    started = time.monotonic()
    written = {fd: bytearray() for fd in reads}
    open_fds, wait_status = list(reads), None
    ending: Ending = "exit"
    while wait_status is None:
        # A program that has closed its outputs may run on: then there is nothing to wait on.
        readable = select.select(open_fds, [], [], _TICK_S if open_fds else 0.002)[0]
        for fd in readable:
            if not _read(fd, written[fd]):
                open_fds.remove(fd)
        wait_status = _ended(child)
        if wait_status is None:
            ending = _over_limit(child, reads, written, scratch, time.monotonic() - started > run.timeout_s)
            if ending != "exit":
                wait_status = _kill(child)
    seconds = time.monotonic() - started
    if missing():
        _kill_group(child)
    for fd in open_fds:
        # Without waiting: what it has started may hold the other end open.
        while select.select([fd], [], [], 0)[0] and _read(fd, written[fd]):
            pass
    out, err, result = (bytes(written[fd]) for fd in reads)
    signalled = os.WIFSIGNALED(wait_status)
    if ending == "exit" and signalled:
        # The kernel's own limit of processor time is the same limit.
        ending = "timeout" if os.WTERMSIG(wait_status) == signal.SIGXCPU else "signal"
    return ProgramResult(
        ending=ending,
        status=os.WTERMSIG(wait_status) if signalled else os.WEXITSTATUS(wait_status),
        stdout=out[:_OUTPUT_BYTES].decode(errors="replace"),
        stderr=err[-_STDERR_BYTES:].decode(errors="replace"),
        result=_parsed(result, word),
        seconds=seconds,
    )


def _read(fd: int, into: bytearray) -> bool:
    """Whether there may be more. Beyond twice the limit nothing is kept."""
    data = os.read(fd, 1 << 16)
    if len(into) < 2 * _OUTPUT_BYTES:
        into += data
    return bool(data)


def _over_limit(child: int, reads: list[int], written: dict[int, bytearray], scratch: Path, late: bool) -> Ending:
    if late:
        return "timeout"
    if any(len(written[fd]) > _OUTPUT_BYTES for fd in reads):
        return "output"
    if _num_threads(child) > _THREADS:
        return "threads"
    return "disk" if _too_much_on_disk(scratch) else "exit"


def _num_threads(child: int) -> int:
    try:
        return len(os.listdir(f"/proc/{child}/task"))
    except OSError:
        return 0


def _too_much_on_disk(scratch: Path) -> bool:
    """Without recursion: the program chooses how deep its folders go."""
    size = entries = 0
    folders = [str(scratch)]
    while folders:
        try:
            with os.scandir(folders.pop()) as found:
                for entry in found:
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512  # a hole takes no disk
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError:
            return True  # a path longer than the system allows
        if entries > _DISK_ENTRIES or size > _DISK_BYTES:
            return True
    return False


def _ended(child: int) -> int | None:
    pid, status = os.waitpid(child, os.WNOHANG)
    return status if pid else None


def _kill(child: int) -> int:
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _kill_group(child: int) -> None:
    """Where a program can start processes (no seccomp), they end with it."""
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _parsed(result: bytes, word: str) -> dict[str, object] | None:
    """What the harness reported; None unless it carries the word of this run, and is no deeper than whoever walks over
    it can go.
    """
    try:
        found = json.loads(result)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.pop("word", None) != word:
        return None
    layer, depth = [found], 0
    while layer and depth < _MAX_DEPTH:
        layer = [item for outer in layer for item in (outer.values() if isinstance(outer, dict) else outer)]
        layer, depth = [item for item in layer if isinstance(item, dict | list)], depth + 1
    return None if layer else found


def _sweep() -> None:
    """Folders of hosts that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).split("_")[0]
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            _remove(folder)
        except (ValueError, PermissionError):  # not one of these folders, or another user's host
            continue


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):  # too deep for a walk in Python, by intent
        subprocess.run(["rm", "-rf", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

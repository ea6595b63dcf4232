"""Escapes from the sandbox of generated programs, each tried and contained; and the client of a sandbox service."""

import json
import os
import resource
import socket
import subprocess
import sys
import threading

import pytest

from roll_async.rewards.code_sandbox import CodeSandbox
from roll_async.rewards.sandbox.confine import missing
from roll_async.rewards.sandbox.local import LocalSandbox
from roll_async.rewards.sandbox.protocol import ProgramRun
from tests.patience import patient

contained = pytest.mark.skipif(bool(missing()), reason=missing() or "contained here")
ADD = "def add(a, b):\n    return a + b"
SUM = "a, b = map(int, input().split())\nprint(a + b)"


def fenced(code):
    return f"Here:\n```python\n{code}\n```\nDone."


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """Where the hosts of this module keep their folders."""
    folder = tmp_path_factory.mktemp("sandboxes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def program(scratch):
    """Run one program; its outcome."""
    local = LocalSandbox()
    yield lambda code, **fields: local.run(ProgramRun(**{"kind": "stdio", "code": code, "timeout_s": 3.0, **fields}))
    local.close()


@contained
def test_the_network_is_closed(program):
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2).send(b'x')"
    outcome = program(code)
    server.settimeout(0.2)
    with pytest.raises(TimeoutError):
        server.accept()
    server.close()
    assert "PermissionError" in outcome.problem
    assert "PermissionError" in program("import socket\nsocket.socket(socket.AF_UNIX)").problem


@contained
@pytest.mark.parametrize(
    "code",
    [
        "print(open({path!r}).read())",
        "open({path!r}, 'w').write('changed')",
        "import os\nos.remove({path!r})",
        "import os\nos.chmod({path!r}, 0o777)",
        "import os\nos.utime({path!r})",
        "import os\nos.symlink({path!r}, 'link')\nprint(open('link').read())",
        "import os\nos.link({path!r}, 'hard')\nprint(open('hard').read())",
        "import os\nos.rename({path!r}, 'mine')",
        "import os\nprint(os.listdir({folder!r}))",
        "import os\nos.truncate({path!r}, 0)",
        "import ctypes, os\nif ctypes.CDLL(None).unshare(0x10000000):\n    raise PermissionError",
    ],
)
def test_files_of_others_stay_unread_and_unchanged(program, tmp_path, code):
    secret = tmp_path / "secret.txt"
    secret.write_text("the expected answer")
    before = secret.stat()
    outcome = program(code.format(path=str(secret), folder=str(tmp_path)))
    assert "Error" in outcome.problem and "expected answer" not in outcome.stdout + outcome.stderr
    assert "secret.txt" not in outcome.stdout
    after = secret.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert secret.read_text() == "the expected answer"


@contained
def test_no_process_can_be_started_and_a_fork_bomb_is_one_error(program):
    bomb, shell = "import os\nwhile True: os.fork()", "import subprocess\nsubprocess.run(['ls'])"
    for code in (bomb, shell, "import os\nos.execv('/bin/ls', ['ls'])"):
        outcome = program(code, timeout_s=patient(10))
        assert outcome.ending == "exit" and "PermissionError" in outcome.problem and outcome.seconds < patient(5)


@contained
def test_signals_reach_nobody_else(program):
    victim = subprocess.Popen(["sleep", "60"])
    for target in (victim.pid, os.getpid(), -1):
        assert "PermissionError" in program(f"import os\nos.kill({target}, 9)").problem
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    assert program("import os, signal\nos.kill(os.getpid(), 9)").ending == "signal"


@contained
def test_the_environment_of_the_run_is_not_there(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "sk-12345")
    local = LocalSandbox()
    outcome = local.run(ProgramRun(kind="stdio", code="import os\nprint(dict(os.environ))", timeout_s=3.0))
    assert outcome.status == 0 and "sk-12345" not in outcome.stdout
    for path in ("/proc/self/environ", f"/proc/{os.getpid()}/environ", "/proc/1/cmdline", "/etc/passwd"):
        assert "PermissionError" in local.run(ProgramRun(kind="stdio", code=f"print(open({path!r}).read())")).problem
    local.close()


@contained
def test_a_process_that_holds_more_than_1024_descriptors_runs_programs(request):
    """As the rollout process of a large run does: a connection for each request under way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"at most {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    request.addfinalizer(lambda: [os.close(fd) for fd in held])
    local = LocalSandbox()
    request.addfinalizer(local.close)
    assert local.run(ProgramRun(kind="stdio", code=SUM, stdin="1 2", timeout_s=3.0)).stdout == "3\n"


def test_memory_has_a_limit(program):
    outcome = program("x = bytearray(4 << 30)", memory_mb=512)
    assert "MemoryError" in outcome.problem or sys.platform != "linux"


def test_files_are_few_and_small(program):
    assert "Too many open files" in program("files = [open(str(i), 'w') for i in range(200)]").problem
    assert "File too large" in program("open('big', 'w').write('x' * (20 << 20))").problem


@contained
def test_limits_cannot_be_raised_again(program):
    code = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"
    assert "Error" in program(code).problem
    code = "import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0): raise PermissionError('kept')"
    assert "kept" in program(code).problem


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("while True: print('x' * 100_000)", "output"),
        ("i = 0\nwhile True:\n    open(str(i), 'w').write('x' * (1 << 20)); i += 1", "disk"),
        ("import os\nwhile True:\n    os.mkdir('d'); os.chdir('d')", "disk"),
        ("import time\ntime.sleep(60)", "timeout"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "timeout"),
        ("import os, time\nos.close(1); os.close(2)\ntime.sleep(60)", "timeout"),
        (
            "import threading, time\nthreading.stack_size(65536)\n"
            "while True: threading.Thread(target=time.sleep, args=(9,)).start()",
            "threads",
        ),
    ],
)  # fmt: skip
def test_what_uses_too_much_is_ended_and_named(program, code, ending):
    outcome = program(code, timeout_s=0.5 if ending == "timeout" else patient(8.0))
    assert outcome.ending == ending and outcome.seconds < patient(6)


def test_nothing_is_left_behind_and_the_next_program_starts_clean(program, scratch):
    program("open('left', 'w').write('x')\nimport builtins\nbuiltins.print = None")
    outcome = program("import os\nprint(os.listdir('.'), os.getcwd())")
    assert outcome.stdout.startswith("[] ") and not list(scratch.glob("roll_async_sandbox_*/*"))


def test_a_host_that_dies_is_replaced_and_its_folder_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    local = LocalSandbox()
    assert local.run(ProgramRun(kind="stdio", code="print(1)")).stdout == "1\n"
    local._host.kill()
    local._host.wait()
    assert local.run(ProgramRun(kind="stdio", code="print(2)")).stdout == "2\n"
    local.close()
    assert not list(tmp_path.glob("roll_async_sandbox_*"))


def test_a_test_file_counts_its_tests():
    pytest.importorskip("pytest")
    fraction = CodeSandbox(case_timeout_s=20.0, scoring="fraction", isolation="best_effort")
    tests = (
        "from solution import add\ndef test_a():\n    assert add(1, 2) == 3\n"
        "def test_b(tmp_path):\n    (tmp_path / 'x').write_text('y')\n    assert add(1, 1) == 3\n"
    )
    verdict = fraction(fenced(ADD), tests, {})
    assert (verdict.score, verdict.acc) == (0.5, 0) and "1 of 2 tests passed" in verdict.reason
    assert fraction(fenced("import nowhere"), tests, {}).score == 0
    fraction._runner.close()


def test_a_test_file_that_the_program_ends_early_has_not_passed():
    reward = CodeSandbox(case_timeout_s=20.0, isolation="best_effort")
    for code in ("import os\nos._exit(0)", "import sys\nsys.exit(0)", "import pytest\npytest.exit('done', 0)"):
        verdict = reward(fenced(code), "from solution import add\ndef test_no():\n    assert False", {})
        assert verdict.score == 0 and verdict.reason
    reward._runner.close()


@pytest.fixture
def fusion():
    """A server that answers as SandboxFusion does, with real runs behind it."""
    import http.server

    local, requests, troubles = LocalSandbox(), [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, body))
            if troubles:
                self.send_error(troubles.pop(0))
                return
            test = {"kind": "pytest", "test": body["code"], "code": ""}
            kind = test if body["language"] == "pytest" else {"kind": "stdio", "code": body["code"]}
            outcome = local.run(ProgramRun(**kind, stdin=body["stdin"], timeout_s=body["run_timeout"]))
            status = outcome.status
            if body["language"] == "pytest":
                status = int(outcome.result is None or outcome.result["passed"] < outcome.result["total"])
            late = outcome.ending == "timeout"
            ran = {
                "status": "TimeLimitExceeded" if late else "Finished",
                "return_code": status,
                "stdout": outcome.stdout,
            }
            answer = {
                "status": "Success",
                "message": "",
                "run_result": {**ran, "stderr": outcome.stderr, "execution_time": 0.1},
            }
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requests, troubles
    server.shutdown()
    server.server_close()
    local.close()


def test_a_sandbox_service_judges_all_forms_alike(fusion):
    url, requests, _ = fusion
    reward = CodeSandbox(api_url=url, case_timeout_s=60.0)
    test_file = "from solution import add\ndef test_a():\n    assert add(1, 2) == 3"
    call = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
    loop = {"test": "def check(f):\n  for i in [1]:\n    assert f(i, 2) == 3", "entry_point": "add"}
    for truth in (call, ["assert add(1, 2) == 3"], loop, {"pytest": test_file}):
        assert reward(fenced(ADD), json.dumps(truth), {}).score == 1
        assert reward(fenced("def add(a, b): return 0"), json.dumps(truth), {}).score == 0
        assert reward(fenced("import os\nos._exit(0)"), json.dumps(truth), {}).score == 0 or "pytest" in truth
    assert reward(fenced("x = 1"), '["assert gcd(4, 6) == 2"]', {}).score == 0
    assert reward(fenced("from __future__ import annotations\n" + ADD), '["assert add(1, 2) == 3"]', {}).score == 1
    assert reward(fenced(SUM), json.dumps({"inputs": ["1 2"], "outputs": ["3"]}), {}).score == 1
    assert {path for path, _ in requests} == {"/run_code"} and requests[0][1]["memory_limit_MB"] == 1024


def test_a_busy_service_is_asked_again_and_a_dead_one_is_an_outage(fusion):
    url, requests, troubles = fusion
    troubles += [503, 429]
    assert CodeSandbox(api_url=url)(fenced(SUM), json.dumps({"inputs": ["1 2"], "outputs": ["3"]}), {}).score == 1
    assert len(requests) == 3
    troubles += [400]
    with pytest.raises(RuntimeError, match="status 400"):
        CodeSandbox(api_url=url)(fenced(SUM), json.dumps({"inputs": ["1 2"], "outputs": ["3"]}), {})
    troubles += [500] * 4
    with pytest.raises(ConnectionError, match="status 500"):
        CodeSandbox(api_url=url)(fenced(SUM), json.dumps({"inputs": ["1 2"], "outputs": ["3"]}), {})

"""What the driver reads of an error of a role, whatever its class: its reason, the file of the role, the traceback. Ray
and its processes are real.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("pydantic")

ROOT = Path(__file__).resolve().parents[2]
DRIVER = '''
import asyncio, sys, traceback
from typing import Protocol
import ray
from roll_async.buffer.errors import EndOfData, RoleFailed
from roll_async.cluster.ray_channel import RayChannel
from roll_async.cluster.remote import CallRules, remote, served
from roll_async.cluster.runtime import ray_runtime
from roll_async.commands.run import exit_code, origin

class OfMain(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")

class RoleCalls(Protocol):
    async def invalid(self) -> None: ...
    async def of_main(self) -> None: ...
    async def unknown(self) -> None: ...
    async def loading(self) -> None: ...
    async def ended(self) -> None: ...
    async def ask(self, what: str) -> None: ...

def calls(name, actor):
    starts = {RoleCalls.invalid, RoleCalls.loading, RoleCalls.ask}
    rules = CallRules(role=name, deadline_s=60, starts=starts, own=(EndOfData,))
    return remote(RoleCalls, RayChannel(actor), rules)

@ray.remote(num_cpus=0)
@served({})
class Role:
    async def invalid(self):
        import pydantic
        class Engine(pydantic.BaseModel):
            max_model_len: int
        Engine(max_model_len="long")

    async def of_main(self):
        raise OfMain(code=5)

    async def unknown(self):
        sys.path.insert(0, FOLDER)
        import only_here
        raise only_here.Odd("only here")

    async def loading(self):
        from roll_async.cluster.folders import require_model
        require_model("/no/such/model")

    async def ended(self):
        raise EndOfData("no more", leftovers=3)

@ray.remote(num_cpus=0)
@served({})
class Between:
    """A role that asks another one, as the rollout process asks engines."""
    def __init__(self, role):
        self.role = role
    async def ask(self, what):
        await getattr(calls("inner", self.role), what)()

FOLDER = sys.argv[1]

async def raised(work):
    try:
        await work
    except Exception as error:
        return error

async def main():
    role = Role.remote()
    between = Between.remote(role)
    for what, kind, text in (
        ("invalid", ValueError, "role: ValidationError: 1 validation error for Engine max_model_len Input should be"),
        ("of_main", RoleFailed, "role: OfMain: code 5"),
        ("unknown", RoleFailed, "role: Odd: only here"),
        ("loading", ValueError, "role: "),
    ):
        for error, prefix in (
            (await raised(getattr(calls("role", role), what)()), ""),
            (await raised(calls("outer", between).ask(what)), "outer: inner"),
        ):
            expected = text if not prefix else text.replace("role", prefix, 1)
            assert type(error) is kind and str(error).startswith(expected), repr(error)
            assert "\\n" not in str(error)
            place, whole = origin(error), "".join(traceback.format_exception(error))
            file, name = (__file__, what) if what != "loading" else ("roll_async/cluster/folders.py", "require_model")
            assert place.startswith(f" [{file}:") and f", in {name};" in place, place
            assert what in whole and "ValidationError" in whole or what != "invalid", whole
            assert exit_code(error) == (2 if kind is ValueError else 3)
    end = await raised(calls("role", role).ended())
    assert isinstance(end, EndOfData) and end.leftovers == 3
    print("all read")

if __name__ == "__main__":
    with ray_runtime(num_processes=3, env={}):
        asyncio.run(main())
'''


@pytest.mark.slow
def test_an_error_of_any_class_crosses_rays_border_with_reason_file_and_traceback(tmp_path):
    (tmp_path / "only_here.py").write_text("class Odd(Exception):\n    pass\n")
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0 and "all read" in done.stdout, done.stdout + done.stderr


BROKEN = """
import sys
from roll_async.cluster.roles.engine_group import RayEngineClient
from roll_async.commands.run import launch

async def submit(self, requests):
    return int("x")

if __name__ == "__main__":
    RayEngineClient.submit = submit
    sys.exit(launch("broken.py", sys.argv[1:], pipeline="rlvr"))
"""


@pytest.mark.slow
def test_a_bug_in_a_client_ends_the_run_with_its_line_and_loses_no_replica(launcher, tmp_path):
    pytest.importorskip("megatron.core")
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    hf = "actor_infer.strategy_args={strategy_name: hf_infer}"
    code, output = launcher.run("max_steps=2", hf, script=script)
    assert code == 3, output
    said = (
        f"ValueError: invalid literal for int() with base 10: 'x' [{script}:7, in submit; the whole way is in run.log]"
    )
    assert output.count(said) == 1 and "is lost" not in output and "started again" not in output, output
    log = (launcher.output / "run" / "run.log").read_text()
    assert f'{script}", line 7, in submit' in log and "replica_link.py" in log


BUGS = """
import sys
from roll_async.commands.fully_async import FullyAsyncMain, Rollouter


def loss(inputs):
    if len(inputs.logprobs) > 2:  # not those of the check at the start
        raise ValueError("a bug in a rank")
    return -inputs.logprobs * inputs.advantages, {}


class Forgetful(Rollouter):
    def _count(self, outcome):
        {}["a bug in the rollout process"]


if __name__ == "__main__":
    forgets = "forgets" in sys.argv
    main = FullyAsyncMain(rollouter=Forgetful if forgets else Rollouter)
    sys.exit(main.run([word for word in sys.argv[1:] if word != "forgets"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "said", "line"),
    [
        ("algorithm.pg_variant=bugs.loss", "ValueError: a bug in a rank", "line 8, in loss"),
        ("forgets", "KeyError: 'a bug in the rollout process'", "line 14, in _count"),
    ],
)
def test_a_bug_in_a_rank_or_in_the_rollout_process_ends_the_run_with_its_line(launcher, tmp_path, asked, said, line):
    pytest.importorskip("megatron.core")
    script = tmp_path / "bugs.py"
    script.write_text(BUGS)
    hf = "actor_infer.strategy_args={strategy_name: hf_infer}"
    code, output = launcher.run(asked, "max_steps=3", hf, config="fully_async_cpu", script=script, small=False)
    assert code == 3, output
    place = line.replace("line ", f"{script}:", 1)
    assert output.count(f"{said} [{place};") == 1, output
    assert "is lost" not in output and "started again" not in output, output
    assert f'"{script}", {line}' in (launcher.output / "run" / "run.log").read_text()

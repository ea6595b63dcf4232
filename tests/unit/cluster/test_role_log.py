"""What a role's process writes lands in the run folder. Without Ray: the redirection itself, and who calls it."""

import ast
import subprocess
import sys
from pathlib import Path

from tests.patience import patient

PACKAGE = Path(__file__).resolve().parents[3] / "roll_async"
SPEAKS = """
import logging, os, sys
from pathlib import Path
from roll_async.observe.run_folder import redirect_output

redirect_output(Path(sys.argv[1]))
print("printed", flush=True)
os.write(2, b"from C\\n")
os.system("echo of a child")
logging.getLogger("roll_async.part").info("logged")
"""


def test_output_of_a_process_and_of_its_children_and_its_log_are_appended_to_the_file(tmp_path):
    file = tmp_path / "actor_train-0.log"
    file.write_text("of the start before\n")
    done = subprocess.run(
        [sys.executable, "-c", SPEAKS, str(file)], capture_output=True, text=True, timeout=patient(120)
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    *lines, logged = file.read_text().splitlines()
    assert lines == ["of the start before", "printed", "from C", "of a child"]
    assert logged.endswith("INFO roll_async.part: logged")


def role_constructors() -> dict[str, ast.FunctionDef]:
    """`__init__` of every class that Ray runs in a process of its own, by name."""
    found = {}
    for path in (PACKAGE / "cluster").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any("ray.remote" in ast.unparse(d) for d in node.decorator_list):
                found[node.name] = next(f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
    return found


def test_every_role_opens_its_log_before_anything_else_and_the_rollout_process_logs_to_the_files_it_is_given():
    constructors = role_constructors()
    assert set(constructors) == {"MegatronRank", "EngineReplica", "RewardHost", "RolloutHost"}
    rollout = constructors.pop("RolloutHost")
    assert "log_to(log_files)" in ast.unparse(rollout)
    for name, constructor in constructors.items():
        assert ast.unparse(constructor.body[0]) == "open_role_log()", name


def test_the_role_redirects_into_the_folder_that_the_launcher_puts_into_its_environment():
    opened, run = (PACKAGE / name for name in ("cluster/role_log.py", "commands/run.py"))
    assert 'redirect_output(Path(folder) / f"{name}.log")' in opened.read_text()
    assert "FOLDER_VARIABLE: str(logs)" in opened.read_text()
    assert "env = role_environment(folder.role_logs())" in run.read_text()
    assert "ray_runtime(num_processes=len(processes) + 2, env=env)" in run.read_text()

"""The command line as a user types it: help with an example, nearest commands, exit codes, where an error came from."""

import subprocess
import sys
from pathlib import Path

import pytest

from roll_async.cli import COMMANDS, main
from roll_async.commands import command_line
from roll_async.commands.run import origin
from roll_async.launch.checks.gate import unsupported
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("start_rlvr_pipeline.py", "start_agentic_pipeline.py", "fully_async_main.py", "fully_async_custom.py")


def python(*args, cwd):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=patient(120), cwd=cwd)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_answers_help_with_an_example_of_itself(name, capsys):
    assert main([name, "--help"]) == 0
    answer = capsys.readouterr().out
    assert f"\n    roll-async {name} " in answer.replace("  Example:", "").replace("\n  roll", "\n    roll"), answer
    assert "Example:" in answer


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launcher_answers_help_with_an_example_from_its_own_folder(name):
    done = python(name, "--help", cwd=ROOT / "examples")
    assert done.returncode == 0, done.stderr
    assert f"Example:\n    python {name} --config" in done.stdout and "KEY=VALUE" in done.stdout


def test_the_help_lists_every_command_and_the_exit_codes_without_importing_torch():
    code = "import sys; from roll_async.cli import main; main(['--help']); print('torch' in sys.modules)"
    done = python("-c", code, cwd=ROOT)
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)
    assert "4 stalled" in done.stdout and done.stdout.endswith("False\n")


def test_an_unknown_command_names_the_nearest_or_all(capsys):
    assert main(["validat"]) == 2
    assert "did you mean 'validate'?" in capsys.readouterr().err
    assert main(["trian"]) == 2
    assert f"unknown command 'trian'; there are {', '.join(COMMANDS)}" in capsys.readouterr().err
    assert main(["frobnicate"]) == 2
    assert f"there are {', '.join(COMMANDS)}" in capsys.readouterr().err
    assert main([]) == 2


def test_bad_usage_is_one_line_that_names_the_help(capsys):
    for args in (["simulate", "--sigma", "x"], ["simulate"], ["convert", "a"]):
        assert main(args) == 2
        problem = capsys.readouterr().err
        assert problem.count("\n") == 1 and f"try: roll-async {args[0]} --help" in problem


def test_a_run_without_a_config_or_with_an_unknown_key_says_so(capsys):
    assert main(["run"]) == 2 and "--config" in capsys.readouterr().err
    assert main(["run", "--config", "rlvr_config_async_cpu", "max_stepz=1"]) == 2
    assert "max_steps" in capsys.readouterr().err


def test_results_are_lines_in_a_pipe_and_a_table_on_a_terminal(capsys, monkeypatch):
    rows = [("step time", "1.5 s"), ("busy", "engines [80%]")]
    command_line.print_pairs(rows)
    assert capsys.readouterr().out == "step time  1.5 s\nbusy       engines [80%]\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    command_line.print_pairs(rows)
    table = capsys.readouterr().out
    assert "engines [80%]" in table and len(table.splitlines()) > 2
    command_line.print_rows(("[a] of b", "c"), [("[1]", "\t")])
    table = capsys.readouterr().out
    assert "[a] of b" in table and "[1]" in table and "\\t" in table


def test_the_plan_names_placement_weight_push_and_batches(capsys):
    assert main(["plan", str(ROOT / "configs/rlvr_config_async.yaml"), "async_generation_ratio=2"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    rows = {name: text.strip() for name, text in lines.items()}
    assert rows["nodes"] == "3 of 8 devices"
    assert rows["actor_train"] == "16 ranks on devices 0-15 (node 0, 1): tensor 2, data 8 parallel"
    assert rows["actor_infer"] == "8 sglang replicas on devices 16-23 (node 2)"
    push = rows["weight transport"]
    assert push.startswith("nccl: ") and push.endswith("engines are paused during the transfer")
    assert rows["training step"] == "64 prompts x 8 samples in 1 optimizer steps of 512 samples"
    assert rows["admitted in total"] == "192, 256, 320 groups after 0, 1, 2 weight pushes, then 192 at a time"
    assert "mean about 2 batches, at most 2 weight versions, policy wait" in rows["staleness"]


def test_the_plan_refuses_what_the_gate_refuses(capsys):
    assert main(["plan", str(ROOT / "configs/rlvr_config_async.yaml"), "weight_sync.transport=cuda_ipc"]) == 2
    assert "C202" in capsys.readouterr().err
    assert main(["plan"]) == 2 and "expected one config" in capsys.readouterr().err


def test_an_error_of_our_own_says_where_it_was_raised():
    try:
        unsupported(None)
    except AttributeError as error:
        assert "[roll_async/launch/checks/gate.py:" in origin(error) and "run.log" in origin(error)
    try:
        raise RuntimeError("elsewhere")
    except RuntimeError as error:
        assert origin(error) == ""

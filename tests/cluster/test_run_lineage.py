"""README's commands, typed in order in one folder, twice: nothing that a run made is lost or mixed with another's."""

import json
import signal

import pytest

from roll_async.checkpoint.run_checkpoints import checkpoints_in
from roll_async.observe.run_record import read_record

pytest.importorskip("ray")
pytest.importorskip("megatron.core")

HF = "actor_infer.strategy_args={strategy_name: hf_infer}"


def steps(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {record["run_id"] for record in records} == {read_record(folder).run_id}
    return [record["step"] for record in records]


def interrupted(launcher, *overrides):
    """Ctrl-C after its first step; what it printed."""
    process, lines = launcher.start(HF, *overrides), []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 1/"):
            process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    return "".join(lines)


def test_the_commands_of_the_readme_in_one_folder_twice_keep_what_each_run_made(launcher):
    run = launcher.output / "run"
    for time in (0, 1):
        code, output = launcher.run(HF, "max_steps=2")
        assert code == 0, output
        whole = read_record(run).run_id
        output = interrupted(launcher, "async_generation_ratio=2", "max_steps=20")
        assert f"the former run {whole} is now {run}.{2 * time + 1}" in output
        assert "continue with: python " in output and "checkpoint.resume_from=latest" in output
        short, done = read_record(run), steps(run)[-1]
        assert short.state == "interrupted" and done < 20
        again = (HF, "async_generation_ratio=2", f"max_steps={done + 1}", "checkpoint.resume_from=latest")
        code, output = launcher.run(*again)
        assert code == 0, output
        assert steps(run) == list(range(1, done + 2)) and read_record(run).run_id == short.run_id
        former = run.with_name(f"run.{2 * time + 1}")
        assert steps(former) == [1, 2] and checkpoints_in(former / "checkpoints").steps() == [2]
        assert (former / "hf" / "config.json").is_file() and read_record(former).state == "finished"
    assert sorted(path.name for path in launcher.output.glob("run*")) == ["run", "run.1", "run.2", "run.3"]
    ids = {read_record(path).run_id for path in launcher.output.glob("run*")}
    assert len(ids) == 4
    code, output = launcher.run(HF, "max_steps=3", "checkpoint.resume_from=latest", name="run.1")
    assert code == 0 and steps(launcher.output / "run.1") == [1, 2, 3], output

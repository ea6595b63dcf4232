"""mini-swe-agent as its users start it: the `mini` command with a config, its own model class and its own shell.

The shell has no programs (PATH), so that what a model without sense writes can do nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = {
    "agent": {"system_template": "Use bash.", "instance_template": "{{task}}", "step_limit": 5},
    "environment": {"env": {"PATH": "/nowhere"}, "timeout": 5},
    "model": {
        "cost_tracking": "ignore_errors",
        "observation_template": "{{output.output}}",
        "format_error_template": "Use bash.",
        "model_kwargs": {"drop_params": True},
    },
}


def main():
    """One task; prints the result, read from the trajectory that the agent saved."""
    number = 10 + json.loads(os.environ["ROLL_ASYNC_TASK"])["seed"] % 90
    with tempfile.TemporaryDirectory() as folder:
        config, saved = Path(folder) / "config.yaml", Path(folder) / "trajectory.json"
        config.write_text(json.dumps(CONFIG))  # JSON is YAML
        mini = str(Path(sys.executable).with_name("mini"))
        command = [
            mini, "-y", "--exit-immediately", "-c", str(config), "-o", str(saved),
            "-m", f"openai/{os.environ['OPENAI_MODEL']}", "-t", f"Print {number}.",
        ]  # fmt: skip
        own = {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": folder,
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        }
        env = {**os.environ, **own, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        subprocess.run(command, cwd=folder, env=env, stdout=sys.stderr, check=True)
        trajectory = json.loads(saved.read_text())
    printed = [m["content"].strip() for m in trajectory["messages"] if m["role"] == "tool"]
    submitted, right = trajectory["info"]["exit_status"] == "Submitted", str(number) in printed
    reward = 0.2 * bool(printed) + 0.3 * submitted + 0.5 * right
    print(json.dumps({"reward": reward, "solved": submitted and right, "metrics": {"commands": len(printed)}}))


if __name__ == "__main__":
    main()

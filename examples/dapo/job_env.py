"""The runtime environment of a submitted job: RUNTIME_ENV with what this shell knows and the job needs.

    python3 examples/dapo/job_env.py examples/dapo/runtime_env.yml

WANDB_API_KEY goes to the job with the package wandb, tokens and addresses of the Hugging Face hub go with it. They are
in the job's description then, which everyone who can see the cluster's dashboard can read.
"""

import os
import sys
from collections.abc import Mapping

import yaml

FORWARDED = ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_BASE_URL", "HF_TOKEN", "HF_ENDPOINT")


def job_env(written: dict, shell: Mapping[str, str]) -> dict:
    """`written`: the file. What it sets itself stays."""
    known = {name: shell[name] for name in FORWARDED if shell.get(name)}
    packages = list(written.get("pip", []))
    if "WANDB_API_KEY" in known and not any(package.startswith("wandb") for package in packages):
        packages.append("wandb")
    return {**written, "env_vars": {**known, **written.get("env_vars", {})}, "pip": packages}


def main() -> None:
    with open(sys.argv[1]) as file:
        written = yaml.safe_load(file)
    yaml.safe_dump(job_env(written, os.environ), sys.stdout)


if __name__ == "__main__":
    main()

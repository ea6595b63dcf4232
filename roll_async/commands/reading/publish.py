"""`roll-async publish`: the model of a run on the Hugging Face hub, with a card that says how it was made."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roll_async.commands.command_line import EXIT_FINISHED, EXIT_INTERRUPTED, HELP, POSITIVE, bad_usage, print_pairs
from roll_async.commands.reading.model_card import MARK, base_of, json_of, run_id, write_card
from roll_async.observe.reading.run_reader import RunReader
from roll_async.observe.run_record import read_record

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

_OF_FORMER_MODELS = ["*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "adapter_config.json"]
"""Removed from a repository where this model has no such file: loaders would take them for a part of it."""
_NAMES = ("_name_or_path", "name_or_path", "base_model_name_or_path")
"""Keys of a model's own files that may be a folder of this machine."""


@click.command(context_settings=HELP)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--repo", required=True, metavar="[OWNER/]NAME", help="The repository; made if it does not exist.")
@click.option("--private", is_flag=True, help="Make the repository private.")
@click.option("--revision", metavar="BRANCH", help="Branch to commit to; made if it does not exist. Default: main.")
@click.option("--adapter", is_flag=True, help="Of a LoRA run: its adapter alone (hf_adapter/), for PEFT and vLLM.")
@click.option("--base-model", "base", metavar="OWNER/NAME", help="The base on the hub, where the run has a folder.")
@click.option("--samples", type=click.IntRange(min=0), default=3, show_default=True, help="How many the card shows.")
@click.option("--replace", is_flag=True, help="Commit over files that are not of this run.")
@click.option("--dry-run", is_flag=True, help="Write what would be uploaded into RUN/hub, and upload nothing.")
@click.option("--output", metavar="DIR", type=click.Path(path_type=Path), help="The same, into this folder.")
@click.option("--timeout", metavar="SECONDS", type=POSITIVE, default=60, show_default=True, help="Of a silent hub.")
def command(
    run: Path,
    repo: str,
    private: bool,
    revision: str | None,
    adapter: bool,
    base: str | None,
    samples: int,
    replace: bool,
    dry_run: bool,
    output: Path | None,
    timeout: float,
) -> int:
    """Upload the model of a run with a model card: how it was trained, results, curve, config, how to use and repeat.

    No secret, address or folder of this machine is in them; prompts and answers of --samples are. A repository with
    files that are not of this run is left as it is, unless --replace says otherwise; what was there stays in its
    history.

    \b
    Example:
      roll-async publish output/addition_demo --repo me/adder --private
      roll-async publish output/addition_demo --repo me/adder --dry-run

    Exit codes: 0 published or written, 2 no run, no model in it, not logged in, or the hub refused or is out of reach,
    130 interrupted.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import get_session, validate_repo_id

    try:
        reader = RunReader(run)
        for name in filter(None, (repo, base)):
            validate_repo_id(name)
        model, step = _model_of(reader, "hf_adapter" if adapter else "hf")
        base = base or base_of(reader)
        if adapter and base is None:
            raise ValueError("--adapter: the run began with a folder; name that model on the hub with --base-model")
        api, target, there = HfApi(), output or (run / "hub" if dry_run else None), False
        if target is None:
            get_session().timeout = timeout  # the client has none of its own
            repo = _named(api, repo)
            there = _check(api, repo, revision, run_id(reader), private=private, replace=replace, timeout=timeout)
        elif target.exists():
            raise ValueError(f"{target} exists; remove it, or name another folder with --output")
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
        # On the disk of the target, where it becomes it by a rename: an interrupt leaves no half of a folder.
        with tempfile.TemporaryDirectory(dir=target and target.parent) as place:
            folder = Path(place) / repo.rpartition("/")[2]
            _copy(model, folder, base, link=target is None)
            write_card(folder, reader, repo=repo, revision=revision, base=base, step=step, num_samples=samples)
            if target is not None:
                folder.rename(target)
                print(f"{target}: what this command uploads without --dry-run or --output; nothing was uploaded")
                return EXIT_FINISHED
            api.create_repo(repo, private=private or None, exist_ok=True)
            if revision:
                api.create_branch(repo, branch=revision, exist_ok=True)
            done = _upload(api, folder, repo, revision, delete=_OF_FORMER_MODELS if there else None)
    except HTTPError as error:
        return bad_usage("publish", ValueError(_told(error, repo)))
    except (ValueError, OSError) as error:
        return bad_usage("publish", ValueError(str(error).strip().splitlines()[0]))
    print_pairs([("published", f"{api.endpoint}/{repo}"), ("model", f"{model}, step {step or '?'}"), ("commit", done)])
    return EXIT_FINISHED


def _model_of(run: RunReader, name: str) -> tuple[Path, int]:
    """(the exported model, its step; 0 = unknown): that of the run's end, else of its newest checkpoint with one.
    Raises ValueError where there is none, with what to do.
    """
    from roll_async.checkpoint.run_checkpoints import RunCheckpoints
    from roll_async.launch.checks.inputs import is_complete

    file = "adapter_config.json" if name == "hf_adapter" else "config.json"
    record, about = read_record(run.path), run.about()
    if (run.path / name / file).is_file():
        json_of(run.path / name / "model.safetensors.index.json")  # which is_complete reads
        if name == "hf" and not is_complete(str(run.path / name)):
            raise ValueError(
                f"{run.path / name} lacks weights: its export was cut off, or goes on; see `roll-async status`"
            )
        return run.path / name, record.exported_step if record else 0
    places = dict.fromkeys([run.path / "checkpoints", Path(str(run.config.get("checkpoint.output_dir") or run.path))])
    saved = [RunCheckpoints(folder=place, run_id=record.run_id if record else None) for place in places]
    for place in saved:  # the first is that of a run whose folder was moved
        for step in reversed(place.steps()):
            if (place.folder_of(step) / name / file).is_file():
                return place.folder_of(step) / name, step
    if name == "hf_adapter":
        raise ValueError(f"{run.path} has no hf_adapter/: only runs with lora_rank write one, when they end")
    again = f"; or go on with it: {about['continue']}" if about["continue"] else ""
    words = ["roll-async", "convert", str(run.path), str(run.path / name)]
    convert = f"; its newest checkpoint becomes one: {shlex.join(words)}"
    if not any(place.steps() for place in saved):
        convert = ""
    raise ValueError(
        f"{run.path} has no hf/, which a run writes when it ends (this one: {about['state']}){convert}{again}"
    )


def _copy(model: Path, target: Path, base: str | None, *, link: bool) -> None:
    """The files of a model, `base` in place of folders of this machine. `link`: weights are links to the run's."""

    def place(source: str, copy: str) -> str:
        if link and source.endswith(".safetensors"):
            os.symlink(os.path.abspath(source), copy)
            return copy
        return shutil.copy2(source, copy)

    shutil.copytree(model, target, copy_function=place)
    for path in model.glob("*config.json"):
        values = json_of(path)
        local = [key for key in _NAMES if str(values.get(key, "")).startswith(("/", ".", "~"))]
        if local or (base and "base_model_name_or_path" in values):
            values |= dict.fromkeys([*local, *(key for key in _NAMES[2:] if key in values)], base)
            (target / path.name).write_text(json.dumps(values, indent=2) + "\n")


def _named(api: HfApi, repo: str) -> str:
    """OWNER/NAME of a repository. Raises ValueError for a user who is not logged in."""
    from huggingface_hub import constants, get_token

    if constants.is_offline_mode():
        raise ValueError("HF_HUB_OFFLINE is set: unset it, or write the folder alone with --dry-run")
    if get_token() is None:
        raise ValueError("not logged in: run `hf auth login`, or set HF_TOKEN to a token that may write")
    user = api.whoami()["name"]  # also the first word with the hub: a wrong token and no network end here
    return repo if "/" in repo else f"{user}/{repo}"


def _check(
    api: HfApi, repo: str, revision: str | None, own: str, *, private: bool, replace: bool, timeout: float
) -> bool:
    """Whether the branch has files. Raises ValueError where they, or who may read them, are not what is expected."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        main = api.model_info(repo, timeout=timeout)
        if private and not main.private:
            raise ValueError(
                f"--private: {repo} exists and is public; make it private on the hub, or name another --repo"
            )
        info = api.model_info(repo, revision=revision, timeout=timeout) if revision else main
    except RevisionNotFoundError:
        return True  # a new branch begins with the files of main, which stay there
    except RepositoryNotFoundError:
        return False
    files = sorted({file.rfilename for file in info.siblings or ()} - {".gitattributes"})
    marked = info.card_data.to_dict().get(MARK) if info.card_data else None
    if files and not replace and (marked is None or marked != own or own == "-"):
        whose = f"files of run {marked}" if marked else "files of no run"
        raise ValueError(
            f"{repo} has {whose} ({', '.join([*files[:3], *['...'] * (len(files) > 3)])}); --replace commits over "
            "them, and its history keeps them; or name another --repo or --revision"
        )
    return bool(files)


def _upload(api: HfApi, folder: Path, repo: str, revision: str | None, delete: list[str] | None) -> str:
    """Upload the folder; the address of the commit."""

    def leave(*_: object) -> None:
        # The client's threads finish the files under way before they let an interrupt through, which may be hours.
        print("roll-async publish: interrupted; the same command uploads what is missing", file=sys.stderr, flush=True)
        shutil.rmtree(folder.parent, ignore_errors=True)
        os._exit(EXIT_INTERRUPTED)

    message, before = f"Model of {folder.name}, published by roll-async", signal.signal(signal.SIGINT, leave)
    try:
        done = api.upload_folder(
            repo_id=repo, folder_path=folder, revision=revision, commit_message=message, delete_patterns=delete
        )
    except RuntimeError as error:  # of a thread that uploads, with its reason as the cause
        raise ValueError(f"the upload to {repo} failed: {error.__cause__ or error}") from error
    finally:
        signal.signal(signal.SIGINT, before)
    return done.commit_url


def _told(error: HTTPError, repo: str) -> str:
    """One line about what the hub, or the way to it, answered."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(error, HfHubHTTPError):
        return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {error}); --dry-run needs no network"
    status = error.response.status_code
    said = re.sub(r"\s+", " ", error.server_message or str(error))
    remedy = {
        401: "the token is not accepted; run `hf auth login`, or set HF_TOKEN",
        403: f"the token may not write to {repo}; make one that may at {constants.ENDPOINT}/settings/tokens",
    }.get(status, "try again later")
    return f"{constants.ENDPOINT} refused with HTTP {status}: {said[:300]}; {remedy}"

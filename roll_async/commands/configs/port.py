"""`roll-async port`: a config of ROLL or verl rewritten in the keys of this project, key by key, with the reasons."""

import sys
import tempfile
from pathlib import Path

import click

from roll_async.commands.command_line import EXIT_USAGE, HELP, print_escaped
from roll_async.commands.configs.validate import report
from roll_async.config.api import ConfigError, Diagnostic
from roll_async.config.loading.names import LOST
from roll_async.config.loading.porting import AnotherPipeline, Port, port
from roll_async.config.yaml.diagnostics import printable
from roll_async.config.yaml.emit import to_yaml
from roll_async.launch.checks.gate import check_supported

_OUT = ("C001", "C002", "C019", "C020")
"""Keys that are not of this project, or have no effect where they are: they are taken out, with the message."""
_ROUNDS = 20


@click.command(context_settings=HELP)
@click.argument("config", metavar="FILE")
@click.option("-o", "--output", metavar="NEW", help="the new file; default: STEM_ported.yaml in the working directory")
@click.option("--pipeline", type=click.Choice(["rlvr", "agentic"]), help="the kind, where the file does not tell")
def command(config: str, output: str | None, pipeline: str | None) -> int:
    """Rewrite FILE, a config of ROLL or verl, in the keys of this project and say what became of each key.

    One line per key: renamed, changed, dropped (nothing is lost, or it had no effect), refused (this project cannot do
    it: read the line). Includes and ${...} are resolved. FILE stays as it is; NEW must not exist.

    \b
    Example:
      roll-async port ROLL/examples/qwen2.5-7B-rlvr_megatron/rlvr_config.yaml -o rlvr_config_of_roll.yaml
    """
    target = Path(output or f"{Path(config).stem}_ported.yaml")
    try:
        found, left = ported(Path(config), pipeline)
    except AnotherPipeline as other:
        print_escaped(f"roll-async port: {config}: {other}", sys.stderr)
        return EXIT_USAGE
    except ConfigError as error:
        report(error.diagnostics, sys.stderr)
        return EXIT_USAGE
    try:
        with open(target, "x", encoding="utf-8") as stream:
            stream.write(text_of(found, config))
    except OSError as error:
        print_escaped(f"roll-async port: {target}: {error.strerror}", sys.stderr)
        return EXIT_USAGE
    for line in _table(found):
        print_escaped(line, sys.stdout)
    for problem in left:
        print_escaped(f"left to you: {problem.key}: {problem.message}", sys.stdout)
    print_escaped(f"wrote {target}: {'not valid yet' if left else 'valid'}", sys.stdout)
    return EXIT_USAGE if left else 0


def ported(path: Path, pipeline: str | None = None) -> tuple[Port, list[Diagnostic]]:
    """The config in keys of this project, and the errors left in it. Raises ConfigError and AnotherPipeline."""
    found = port(path, pipeline)
    errors: list[Diagnostic] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path.name  # under its own name, from which exp_name comes
        # The check ends with the phase that finds errors: once they are out, the next phase is seen.
        for _ in range(_ROUNDS):
            file.write_text(text_of(found, ""), encoding="utf-8")
            try:
                check_supported(file, pipeline=found.kind)
                return found, []
            except ConfigError as error:
                errors = [d for d in error.diagnostics if d.is_error]
            if not [d for d in errors if _taken_out(found, d)]:
                break
    return found, errors


def _taken_out(found: Port, problem: Diagnostic) -> bool:
    """Whether the key of a problem was one to take out, and is gone now."""
    path = problem.key.split(".")
    settings = (
        len(path) > 3 and path[0] == "custom_envs" and path[2] == "env_config" and "unknown key" in problem.message
    )
    if problem.id not in _OUT and not settings:
        return False
    above = found.get(*path[:-1])
    if not isinstance(above, dict) or path[-1] not in above:
        return False
    value = above.pop(path[-1])
    if path[0] in found.referenced and len(path) == 1:
        found.note("dropped", problem.key, "a value for ${...}; it is where it was used")
    elif settings:
        turns = path[-1] == "max_steps"
        why = "turns are those of custom_envs.TAG.max_steps" if turns else "the world has no such setting"
        found.note("dropped" if turns else "refused", problem.key, why)
    elif value != {}:
        why = problem.message.removeprefix("not a key of roll_async: ")
        is_lost = problem.id == "C001" or (path[-1] in LOST and value)
        found.note(
            "refused" if is_lost else "dropped", problem.key, why if problem.id == "C002" else why.partition("; ")[0]
        )
    return True


def text_of(found: Port, source: str) -> str:
    """The new file; with a `source`, the table is its head."""
    head = [
        f"# From {printable(source)} by `roll-async port`. What became of its keys:",
        *(f"#   {x}" for x in _table(found)),
        "",
    ]
    text = to_yaml({"pipeline": found.kind, **found.tree})
    return ("\n".join(head) if source else "") + text


def _table(found: Port) -> list[str]:
    """One line per key."""
    order = ("renamed", "changed", "dropped", "refused")
    rows = sorted(dict.fromkeys(found.changes), key=lambda change: (order.index(change.what), change.key))
    return [printable(f"{row.what:<8} {row.key}: {row.why}") for row in rows]

"""A page of docs_roll/models/ for each family, made from its certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from roll_async.checkpoint.hf_names.table import Family
from roll_async.checkpoint.known_models import known_names
from roll_async.commands.certify.checks import Check


def write_page(folder: Path, family: Family, found: Mapping[str, Sequence[Check]]) -> None:
    """`found`: checks by the name of the small model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{family.name}.md").write_text(page(family, found))


def page(family: Family, found: Mapping[str, Sequence[Check]]) -> str:
    """Markdown."""
    architectures = ", ".join(f"`{name}`" for name in family.architectures)
    sizes = ", ".join(known_names(family.architectures))
    whats = list(dict.fromkeys(check.what for checks in found.values() for check in checks))
    by_shape = {shape: {check.what: check for check in checks} for shape, checks in found.items()}
    rows = [
        "| " + " | ".join((what, *(_cell(checks.get(what)) for checks in by_shape.values()))) + " |" for what in whats
    ]
    ended = "All checks hold." if all(c.holds for checks in found.values() for c in checks) else "**Some checks fail.**"
    return "\n".join(
        [
            f"# {family.name}",
            "",
            f"Made by `roll-async certify {family.name} --pages docs_roll/models`. {ended}",
            "",
            f"Architectures: {architectures}. A `config.json` that asks for what the",
            "rows of the family do not describe is refused by its key.",
            "",
            *(
                [f"Memory is known without a download (`roll-async show CONFIG --memory`) for {sizes}.", ""]
                if sizes
                else []
            ),
            "## Certificate",
            "",
            "Small random models with every part that the family may have, float32, two cores; what the checks are is",
            "in [model families](../conversion.md#certificates).",
            "",
            "| check | " + " | ".join(by_shape) + " |",
            "|---" * (1 + len(by_shape)) + "|",
            *rows,
            "",
        ]
    )


def _cell(check: Check | None) -> str:
    if check is None:
        return ""
    return check.found.partition(" (")[0] if check.holds else f"**FAILS**: {check.found}"

"""Placeholders of `agent_template` and `agent_system_template`, with the names and the rules of ROLL.

agent_template is a format string of Python: "{turn_idx}" is filled, "{{" and "}}" are braces. In agent_system_template,
a text in which others write JSON and LaTeX, "{name}" is filled and "{{text}}" says "{text}"; every other brace is
itself. So "\\boxed{your answer}" may stand in a system template, and is "\\boxed{{your answer}}" in the other.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping

PLACEHOLDERS: Mapping[str, str | int] = {
    "observation": "",
    "suffix": "",
    "current_observation": "",
    "instructions": "",
    "env_instruction": "",
    "turn": 1,
    "turn_idx": 1,
    "current_step": 1,
    "step_count": 0,
    "max_turns": 1,
    "actions_left": 1,
    "max_response_length": 1,
    "history": "",
    "history_length": 0,
}
"""The known names, each with a value of its type."""
RULES = ("instructions", "env_instruction")
"""Names of the world's rules."""
_IN_SYSTEM = re.compile(r"\{\{([^{}]*)\}\}|\{([A-Za-z_]\w*)\}")


def names_in(template: str, *, system: bool) -> set[str]:
    """Names of the placeholders of a template. Raises ValueError for an agent_template that is no format string."""
    if system:
        return {found[2] for found in _IN_SYSTEM.finditer(template) if found[2] is not None}
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def filled(template: str, values: Mapping[str, str | int], *, system: bool) -> str:
    """The template with these values, which are taken as they are, braces and all."""
    if system:
        return _IN_SYSTEM.sub(lambda m: str(values[m[2]]) if m[2] is not None else f"{{{m[1]}}}", template)
    return template.format(**values)


def problem_of(template: str, *, system: bool) -> str | None:
    """Why a template cannot be filled, with the remedy; None = it can."""
    remedy = "; a literal brace is written twice"
    try:
        unknown = sorted(names_in(template, system=system) - PLACEHOLDERS.keys())
        if unknown:
            known = ", ".join(PLACEHOLDERS)
            return f"unknown placeholder {', '.join(f'{{{name}}}' for name in unknown)}; known are: {known}{remedy}"
        # A format such as {turn:d} fails only with a value of the wrong type.
        filled(template, PLACEHOLDERS, system=system)
    except (ValueError, KeyError, IndexError) as error:
        return f"cannot be filled: {error}{remedy}"
    return None

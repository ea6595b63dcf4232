"""Which distillation teacher scores the answers to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def teacher_of(domain: str, extra: Mapping[str, str], teachers: Sequence[str]) -> str:
    """The name in the column `teacher`, else that of the domain, else the only one. The short form of the config, which
    is one of the name teacher, scores every row.

    Example: teachers maths and code, a row of domain code without the column -> code. Raises ValueError for a name that
    is not there, and for a row that does not choose.
    """
    if list(teachers) == ["teacher"]:
        return "teacher"
    named = extra.get("teacher", domain if domain in teachers or len(teachers) > 1 else teachers[0])
    if named in teachers:
        return named
    if "teacher" in extra:
        raise ValueError(f"teacher {named!r} is none of teachers ({', '.join(teachers)}); name one of them")
    raise ValueError(f"it has no column teacher, and no teacher is called as its domain {domain}; add the column")

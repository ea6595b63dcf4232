"""Suggestions for misspelt names."""

import difflib
import unicodedata
from collections.abc import Sequence

_MAX_LENGTH = 80
_NEAR = 0.75
"""A smaller share of equal letters is another word, and the wrong key is a worse hint than none."""


def closest(name: str, candidates: Sequence[str]) -> str | None:
    """The nearest candidate; None if none is near, or the name is too long to be a typing error."""
    if len(name) > _MAX_LENGTH:
        return None
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=_NEAR)
    return found[0] if found else None


def foreign_character(text: str) -> str:
    """` (contains U+0430 CYRILLIC SMALL LETTER A)` for the first non-ASCII character, else nothing."""
    for c in text:
        if ord(c) > 127:
            return f" (contains U+{ord(c):04X} {unicodedata.name(c, 'UNNAMED')})"
    return ""

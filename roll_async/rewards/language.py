"""Which language a text is written in, by a trained model of character sequences (py3langid, 8 MB in memory)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

LANGUAGES = frozenset(
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh".split()
)
"""ISO 639-1. Those that IFEval's own checker (langdetect) knows: fewer neighbours, fewer confusions."""
_OLD_CODES = {"iw": "he", "in": "id", "fil": "tl", "nb": "no"}


def language_of(text: str) -> str:
    """The most likely of LANGUAGES. A guess for a few words; a text in two languages has the one that prevails."""
    # Capitals are rare in what the model saw: a text of capitals alone would be told by nothing else.
    return _identifier().classify(text.lower())[0]


def known_language(code: str) -> str:
    """`zh-cn` -> `zh`, `iw` -> `he`. Raises ValueError for a language that is not told apart."""
    plain = code.strip().lower().replace("_", "-").partition("-")[0]
    plain = _OLD_CODES.get(plain, plain)
    if plain not in LANGUAGES:
        raise ValueError(f"language {code!r} is not one of {' '.join(sorted(LANGUAGES))}")
    return plain


@cache
def _identifier() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages(LANGUAGES)
    return identifier

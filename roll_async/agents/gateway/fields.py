"""What becomes of each field of a request: acted on, ignored and counted, or refused by its name; never overlooked.

A dialect has one literal table of its fields (`FIELDS`); the handler acts by it, and `python -m
roll_async.agents.gateway.fields` prints all of them (docs_roll/gateway_fields.md). A field with null is absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from roll_async.agents.turn_handler import BadRequest

Json = Mapping[str, object]
_LONGEST_NAME = 100


class Use(str, Enum):
    """What is done with a field."""

    ACTS = "acted on"
    SAMPLING = "acted on by serve-policy; in training ignored and counted"
    IGNORED = "ignored and counted"
    REFUSED = "refused (400)"


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `a.b` is one of an object, `a[].b` one of every object of a list."""

    use: Use
    says: str = ""
    """Why, or what to do."""
    neutral: tuple[object, ...] = ()
    """Values that ask for nothing: taken, and not counted."""


def acts(says: str = "") -> Field:
    """A field that does what the API says."""
    return Field(Use.ACTS, says)


def ignored(says: str, *neutral: object) -> Field:
    """A field that changes nothing here."""
    return Field(Use.IGNORED, says, neutral)


def refused(says: str, *neutral: object) -> Field:
    """A field whose promise cannot be kept."""
    return Field(Use.REFUSED, says, neutral)


SAMPLING = Field(Use.SAMPLING, "one setting for all turns, with which log-probs are compared")
LABEL = ignored("a label for the provider's books")
CACHE = ignored("prefixes are cached without it")
EFFORT = ignored("how the policy thinks and writes is what is trained")


def check(body: Json, fields: Mapping[str, Field]) -> tuple[list[str], list[str]]:
    """(names of the ignored fields, of those for sampling) that the body has. Raises BadRequest with the name of a
    field that is refused, or that the API does not have.
    """
    for name in body:
        if name not in fields and body[name] is not None:
            raise BadRequest(f"{name[:_LONGEST_NAME]}: there is no such field; remove it")
    found: dict[Use, list[str]] = {Use.IGNORED: [], Use.SAMPLING: []}
    for name, field in fields.items():
        if field.use is Use.ACTS:
            continue
        asked = [value for value in _values(body, name) if not _is_neutral(value, field)]
        if asked and field.use is Use.REFUSED:
            raise BadRequest(f"{name}: {field.says}")
        if asked:
            found[field.use].append(name)
    return found[Use.IGNORED], found[Use.SAMPLING]


def _is_neutral(value: object, field: Field) -> bool:
    # 0 == False and 1 == True in Python, and not in JSON.
    return any(value == neutral and isinstance(value, bool) is isinstance(neutral, bool) for neutral in field.neutral)


def _values(body: object, path: str) -> Iterator[object]:
    """The values at a path, without null; nothing where the form is another one."""
    name, _, rest = path.partition(".")
    value = body.get(name.removesuffix("[]")) if isinstance(body, Mapping) else None
    if not rest:
        if value is not None:
            yield value
    elif not name.endswith("[]"):
        yield from _values(value, rest)
    elif isinstance(value, list):
        for item in value:
            yield from _values(item, rest)


def table(fields: Mapping[str, Field]) -> str:
    """As Markdown."""
    rows = []
    for name, field in fields.items():
        neutral = f" (taken: {', '.join(f'`{value!r}`' for value in field.neutral)})" if field.neutral else ""
        rows.append(f"| `{name}` | {field.use.value} | {field.says}{neutral} |")
    return "\n".join(["| field | what is done | why |", "|---|---|---|", *rows])


def page() -> str:
    """The page of the docs."""
    from roll_async.agents.gateway import anthropic, chat, responses  # here, since they import this module

    parts = [
        "# Fields of requests to the endpoint",
        "Made by `python -m roll_async.agents.gateway.fields > docs_roll/gateway_fields.md`. A field that is not "
        "listed is refused\nby its name, null is as absent. What is ignored is counted in `agent/ignored_fields/NAME` "
        "and told in the\nlog, once for each field.",
    ]
    for title, dialect in (
        ("/v1/chat/completions", chat),
        ("/v1/responses", responses),
        ("/v1/messages, /v1/messages/count_tokens", anthropic),
    ):
        parts += [f"## {title}", table(dialect.FIELDS)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(page())

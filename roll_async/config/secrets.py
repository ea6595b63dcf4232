"""Which values of a config are secrets. They stay out of every file of a run; a later start takes them from the config
again, or from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar, cast

from roll_async.config.schema import RunConfig

HIDDEN = "<hidden>"
"""In place of a secret."""
_ENVIRONMENTS = ("system_envs", "env")
"""Maps of variables: nobody knows which of them are secrets."""
_FREE_FORM = ("tracker_kwargs", "env_config", "tool_args", "extra")
# A token is one, max_tokens and a tokenizer are none.
_SECRET_NAME = re.compile(
    r"(api|access|secret|private|auth)[_-]?key|token(?!s|iz)|secret|passw|passphrase|pwd|credential|authorization", re.I
)
_PASSWORD, _NO_PASSWORD = re.compile(r"://[^\s/@:]*:[^\s/]+@"), f"://{HIDDEN}@"
"""In an address, and what is shown of it."""
_KEY_VALUE = re.compile(r"[\w.-]+=")
C = TypeVar("C", bound=RunConfig)
Path = tuple[str, ...]
_Change = Callable[[Path, object], object]


def is_secret(path: Path, value: object = None) -> bool:
    """Whether the value at this path of a config is one."""
    inside = path[:-1]
    if any(name in inside for name in _ENVIRONMENTS) or (isinstance(value, str) and _PASSWORD.search(value)):
        return True
    return any(name in inside for name in _FREE_FORM) and _SECRET_NAME.search(path[-1]) is not None


def shown_override(text: str) -> str:
    """A word of a command as it may be shown and stored: no value at or above a key that may be a secret, and no
    password of an address.
    """
    key, separator, value = text.partition("=")
    path = tuple(key.split("."))
    hidden = is_secret(path) or is_secret((*path, "token"))
    return _PASSWORD.sub(_NO_PASSWORD, f"{key}{separator}{HIDDEN if hidden else value}")


def shown_text(text: str, handed: Mapping[str, object]) -> str:
    """A word of the command line, or what a tracker says, without secrets. `handed`: what the tracker got of
    `tracker_kwargs`.
    """

    def secrets(value: object, path: Path) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from secrets(item, (*path, str(key)))
        elif value not in (None, "") and is_secret(path):
            yield str(value)

    text = shown_override(text) if _KEY_VALUE.match(text) else _PASSWORD.sub(_NO_PASSWORD, text)
    for secret in sorted(secrets(handed, ("tracker_kwargs",)), key=len, reverse=True):  # one may be a part of another
        text = text.replace(secret, HIDDEN)
    return text


def without_secrets(config: C) -> C:
    """The config with HIDDEN in place of every secret; of an address, of its user and password."""

    def hide(path: Path, value: object) -> object:
        # What is not set, or is a switch, tells nothing.
        empty = value is None or value == "" or isinstance(value, bool)
        if empty or not is_secret(path, value):
            return value
        return HIDDEN if is_secret(path) else _PASSWORD.sub(_NO_PASSWORD, str(value))

    return cast(C, changed_leaves(config, (), hide))


def with_secrets(config: C, environment: Mapping[str, str]) -> C:
    """The inverse: every HIDDEN becomes the variable that is called like the last part of its key, in an address like
    the whole key with `_` between its words. Raises ValueError with the keys that have none.
    """
    missing: dict[str, str] = {}

    def reveal(path: Path, value: object) -> object:
        if not isinstance(value, str) or (value != HIDDEN and _NO_PASSWORD not in value):
            return value
        variable = path[-1] if value == HIDDEN else re.sub(r"\W", "_", ".".join(path))
        if variable not in environment:
            missing[".".join(path)] = variable
        return value.replace(HIDDEN, environment.get(variable, HIDDEN))

    revealed = cast(C, changed_leaves(config, (), reveal))
    if missing:
        variables = ", ".join(dict.fromkeys(missing.values()))
        raise ValueError(
            f"{', '.join(missing)}: {HIDDEN} stands for a secret, which no file of a run holds; write its value into "
            f"the config, or set the environment variable {variables}"
        )
    return revealed


def changed_leaves(value: object, path: Path, change: _Change) -> object:
    """A copy with every leaf changed by `change(path, leaf)`, items of a list at their position; the same object where
    none does.
    """
    if is_dataclass(value) and not isinstance(value, type):
        items = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, Mapping):
        items = dict(value)
    elif isinstance(value, list | tuple):
        items = {str(i): item for i, item in enumerate(value)}
    else:
        return change(path, value)
    new = {key: changed_leaves(item, (*path, str(key)), change) for key, item in items.items()}
    if all(new[key] is items[key] for key in items):
        return value
    if isinstance(value, Mapping):
        return new
    if isinstance(value, list | tuple):
        return type(value)(new.values())
    return replace(cast(RunConfig, value), **new)

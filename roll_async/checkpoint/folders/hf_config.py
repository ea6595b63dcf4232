"""Typed access to a Hugging Face config.json: a missing value or one of another type is a ValueError that names it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


class HfConfig:
    """One config.json. `source` names the file in errors. That of a model which also reads images is read as its
    language model's: newer files keep those sizes in a section of their own, older ones at the top.
    """

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        inner = values.get("text_config")
        if isinstance(inner, Mapping):
            values = {**inner, **{key: value for key, value in values.items() if value is not None}}
        self.values, self.source = values, source

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is there (transformers renames keys between releases), else the default."""
        value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int):  # True is an int to Python
            raise ValueError(f"{self.source}: {keys[0]} is {value!r}, expected an integer")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        """As `integer`, for floats."""
        value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.source}: {keys[0]} is {value!r}, expected a number")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A boolean; absent or null is the default."""
        value = self._first((key,), default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.source}: {key} is {value!r}, expected true or false")
        return value

    def layers(self, key: str) -> tuple[int, ...]:
        """A list of integers, mostly layer numbers; absent is none."""
        value = self._first((key,), [])
        if not isinstance(value, list) or any(not isinstance(x, int) for x in value):
            raise ValueError(f"{self.source}: {key} is {value!r}, expected a list of integers")
        return tuple(value)

    def section(self, *keys: str) -> HfConfig:
        """A nested object; absent is an empty one."""
        value = self._first(keys, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.source}: {keys[0]} is {value!r}, expected an object")
        return HfConfig(value, f"{self.source}: {keys[0]}")

    def architecture(self) -> str:
        """The first of `architectures`."""
        names = self.values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise ValueError(f"{self.source} names no architecture (architectures is {names!r})")
        return names[0]

    def require(self, **wanted: object) -> None:
        """Refuse a model that the family's table does not describe: a key must be absent, null or the given value."""
        for key, value in wanted.items():
            found = self.values.get(key)
            if found is not None and found != value:
                raise ValueError(f"{self.source}: {key}={found!r} is not supported, only {value!r} is")

    def _first(self, keys: tuple[str, ...], default: object) -> object:
        for key in keys:
            if self.values.get(key) is not None:
                return self.values[key]
        if default is None:
            raise ValueError(f"{self.source}: {' or '.join(keys)} is missing")
        return default


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises ValueError that names the file for anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # of JSON, and of its text
        raise ValueError(f"{path} is truncated or not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds {type(values).__name__}, expected an object")
    return values

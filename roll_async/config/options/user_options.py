"""Settings of a user's own code (world, tool, loss, estimator): plain values to its own dataclass, strictly."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from roll_async.config.user_code import find, told


def build_options(cls: type, values: Mapping[str, object], key: str) -> object:
    """`cls(**values)` after a check of names and types. Raises ValueError with key, value and the known keys."""
    assert is_dataclass(cls), f"{cls.__name__} must be a dataclass"
    hints = _hints(cls)
    known = {f.name: f for f in fields(cls) if f.init}
    for name in values:
        if name not in known:
            raise ValueError(f"{key}.{name}: unknown key; {cls.__name__} has: {', '.join(known) or 'none'}")
    checked = {name: _checked(value, hints[name], f"{key}.{name}") for name, value in values.items()}
    for name, field in known.items():
        if name not in checked and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{key}.{name}: required and not set")
    try:
        return cls(**checked)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def own_function(path: str, key: str, options_key: str, gives: str) -> Callable[[Any, Mapping[str, object]], tuple]:
    """The user's function MODULE.NAME as `call(inputs, given)`, which returns a pair. `given`: plain values for the
    dataclass that its parameter `options` is annotated with; a function without this parameter takes none. `gives`: the
    pair in words. Raises ValueError that names `key` where there is no such function, and `call` one that names `key`
    for what is no pair, and `options_key` for values that do not fit.
    """
    try:
        function: Any = find(path)
        parameters = inspect.signature(function).parameters
        options = get_type_hints(function).get("options")
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"{key}: {path} cannot be used: {told(error)}") from error
    if "options" in parameters and not (isinstance(options, type) and is_dataclass(options)):
        raise ValueError(f"{key}: the parameter options of {path} must be annotated with a dataclass")

    def call(inputs: Any, given: Mapping[str, object]) -> tuple:
        if given and options is None:
            raise ValueError(f"{options_key}.{next(iter(given))}: {path} takes no options")
        extra = () if options is None else (build_options(options, given, options_key),)
        result = function(inputs, *extra)
        if not isinstance(result, tuple) or len(result) != 2:  # the rows of a tensor would unpack, too
            raise ValueError(f"{key}: {path} must return {gives}, not a {type(result).__name__}")
        return result

    return call


@lru_cache(maxsize=256)
def _hints(cls: type) -> dict[str, object]:
    return get_type_hints(cls)  # 50 us, for every world that is opened


def _checked(value: object, hint: object, key: str) -> object:
    """The value converted to the type of the hint; lists become tuples and ints floats where that is asked for."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        wanted = [part for part in get_args(hint) if part is not type(None)]
        return _checked(value, wanted[0], key)
    if origin is Literal:
        if value not in get_args(hint):
            raise ValueError(f"{key}: {value!r} is not one of {' | '.join(map(str, get_args(hint)))}")
        return value
    if origin in (tuple, list, Sequence):
        if not isinstance(value, list | tuple):
            raise ValueError(f"{key}: expected a list, got {type(value).__name__} {value!r}")
        item = get_args(hint)[0] if get_args(hint) else object
        return tuple(_checked(v, item, f"{key}.{i}") for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = origin or hint
    if isinstance(plain, type) and plain is not object:
        # In Python True is an int, and must not pass as 1.
        if not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool):
            raise ValueError(f"{key}: expected {plain.__name__}, got {type(value).__name__} {value!r}")
    return value

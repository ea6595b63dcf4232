"""Types of scalars: int to float is the only conversion."""

import math
import re

_YAML_11_BOOLS = ("yes", "no", "on", "off", "y", "n", "true", "false")
_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?")


def has_type(value: object, wanted: str) -> bool:
    """Whether a parsed value is an int, float (an int is one), str or bool. `true` is no int."""
    match wanted:
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case _:
            return isinstance(value, bool)


def check_scalar(value: object) -> str:
    """What a number must be if it is not: 64 bits, finite; empty if all is well."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return "an integer of 64 bits"
    return ""


def remedy(wanted: str, value: object) -> str:
    """How to write a value of the wanted type; empty if there is no simple correction."""
    if value is None:
        return "; give a value or remove the key"
    if isinstance(value, str):
        if wanted == "bool" and value.lower() in _YAML_11_BOOLS:
            return f"; write {'true' if value.lower() in ('yes', 'on', 'y', 'true') else 'false'}"
        if wanted in ("int", "float") and _NUMBER.fullmatch(value):
            return "; remove the quotes"
    if wanted == "str" and isinstance(value, bool | int | float):
        return "; quote it"
    if wanted == "int" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    return ""

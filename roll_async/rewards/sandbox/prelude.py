"""What the field's evaluators import in front of a program (LiveCodeBench, APPS and their descendants do): models write
`List[int]` and `deque` without importing them, and were trained against evaluators that accept it.
"""

from __future__ import annotations

import inspect

_STAR = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip
_NAMED = (*_STAR, "time", "os", "array", "queue")
RECURSION_LIMIT = 50_000
BEFORE = "_roll_async_before"
"""Names of the prelude, as the program found them."""

PRELUDE = "\n".join(
    [
        *(f"from {module} import *" for module in _STAR),
        *(f"import {module}" for module in _NAMED if module not in ("datetime", "copy", "array")),
        "import datetime as _datetime_module, array, copy",
        "from datetime import datetime",
        "from copy import deepcopy",
        "from builtins import *",  # operator, math and io hide pow, abs, open
        f"sys.setrecursionlimit({RECURSION_LIMIT})",
        "getattr(sys, 'set_int_max_str_digits', int)(0)",  # the time limit bounds what long integers cost
        "",
    ]
)
"""Runs before the program, in its namespace. docs_roll/rewards.md shows it."""


def own_names(names: dict[str, object], before: dict[str, object]) -> dict[str, object]:
    """What a test may call: without the prelude's functions that the program left as they were. A program that does
    not define `gcd` must not pass by `math.gcd`. Self-contained: a remote sandbox gets its source.
    """
    kinds = (type, type(before.get("math")))
    kept = {k for k, v in before.items() if isinstance(v, kinds) or k[:2] == "__"}
    return {k: v for k, v in names.items() if k in kept or k not in before or before[k] is not v}


OWN_NAMES_SOURCE = inspect.getsource(own_names)
PROGRAM_MODULE = "_program"
SOLUTION_FILE = f"""{OWN_NAMES_SOURCE}
import {PROGRAM_MODULE}
globals().update(
    (k, v) for k, v in own_names(vars({PROGRAM_MODULE}), {PROGRAM_MODULE}.{BEFORE}).items() if k[:2] != "__"
)
"""
"""What test files import as `solution` when the program stands in PROGRAM_MODULE behind the prelude."""


def import_modules() -> None:
    """In the host, once: its children find them imported."""
    # Without the limits, which are for the program and not for its host.
    imports = "\n".join(line for line in PRELUDE.splitlines() if "sys.set" not in line and "max_str_digits" not in line)
    exec(compile(imports, "prelude", "exec", dont_inherit=True), {})


def with_prelude(code: str) -> str:
    """Program text for an evaluator that runs one file."""
    if "__future__" not in code:
        return f"{PRELUDE}{BEFORE} = dict(globals())\n{code}"
    # Such imports stand first in a file. The names are given: left out, Python 3.12.1 may take a copy of them.
    program = f"exec(compile({code!r}, 'solution.py', 'exec', dont_inherit=True), globals())"
    return f"{PRELUDE}{BEFORE} = dict(globals())\n{program}\n"

"""A user's own code: found by dotted path, and the place where it raised.

A module is one that Python finds anyway, or one beside the config, in the working folder of the command, or in the
checkout, whose examples shipped configs name. Other processes have other working folders, so these are told to them in
the environment.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

from roll_async.config.yaml.compose import CHECKOUT

FOLDERS_VARIABLE = "ROLL_ASYNC_CODE_FOLDERS"
"""Folders of a user's modules, separated like those of PATH."""
_LIBRARIES = tuple(
    # "<": code without a file, such as <frozen importlib._bootstrap>.
    {str(Path(__file__).parents[1]) + os.sep, "<"}
    | {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_MOST_CHARACTERS = 20_000


def search_beside(config: Path) -> None:
    """Find modules beside this config, in the working folder and in the checkout from now on, here and in processes
    that start later.
    """
    os.environ[FOLDERS_VARIABLE] = os.pathsep.join(folders_beside(config))


def folders_beside(config: Path) -> list[str]:
    """Where modules are looked for after those that Python finds anyway, each once."""
    return list(dict.fromkeys((os.path.abspath(config.parent), os.getcwd(), str(CHECKOUT))))


def find(path: str) -> object:
    """What a dotted path names. Raises ImportError or AttributeError when there is no such thing, and what the module
    raises.
    """
    module, _, name = path.rpartition(".")
    folders = [folder for folder in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if folder]
    # Behind all others: a file of the user's that is called like a library must not replace it for everybody.
    sys.path += [folder for folder in folders if folder not in sys.path]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        # Another name: the module was found, and one that it imports was not.
        if not folders or error.name not in (module, module.partition(".")[0]):
            raise
        places = " and ".join(dict.fromkeys(folders))
        raise ModuleNotFoundError(f"{error} (looked in {places} and where Python looks)", name=error.name) from error


def place_of(error: BaseException) -> str:
    """`FILE:LINE, in FUNCTION` of the innermost line of a user's own that an error went through; empty without one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES)]
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""


def is_library(module: ModuleType) -> bool:
    """Whether every process finds the module: one of this package, of Python or an installed one."""
    file = getattr(module, "__file__", None)  # modules in C have none
    return file is None or os.path.abspath(file).startswith(_LIBRARIES)


def told(error: BaseException) -> str:
    """One line: what was raised, and the place."""
    text = " ".join(str(error).split())
    if not isinstance(error, ImportError | AttributeError):
        text = f"{type(error).__name__}: {text}"
    return text + at(place_of(error))


def at(place: str) -> str:
    """A place, to be appended to a message."""
    return f" [{place}]" if place else ""


def defined_at(function: object) -> str:
    """The same of the first line of a function, or of an object that is called like one; empty for one in C."""
    called = function if inspect.isroutine(function) else type(function).__call__
    code = getattr(inspect.unwrap(called), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}" if code is not None else ""


def traceback_of(error: BaseException) -> str:
    """The traceback as text; of a long one its end."""
    return "".join(traceback.format_exception(error))[-_MOST_CHARACTERS:]

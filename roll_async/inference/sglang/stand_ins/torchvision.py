"""SGLang imports torchvision also for text models, and its wheel does not load with a CPU build of torch. Every name
below it is a class whose attributes are such classes; nothing of it is called for text.
"""

import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

__version__ = "0.0"
__path__ = []  # a package: the finder below has its modules


class _Nothing(type):
    def __getattr__(cls, name: str) -> Any:
        return __getattr__(name)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Nothing(name, (), {"__init__": lambda self, *a, **k: None, "__call__": lambda self, *a, **k: None})


class _Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name: str) -> Any:
        return __getattr__(name)


class _Finder(MetaPathFinder, Loader):
    """Any module below torchvision."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())

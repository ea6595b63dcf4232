"""Cross-field rules C101 to C155: what no single key can break.

Each rule is a generator of (id, key, message); the place of a message is where its key was written, or the nearest
section.
"""

from collections.abc import Iterable

from roll_async.config.rules import learning, running_ahead, shape
from roll_async.config.rules.contradictions import Finding
from roll_async.config.schema import PipelineConfig
from roll_async.config.yaml.diagnostics import Diagnostic
from roll_async.config.yaml.node import Node, diagnostic, nearest

_RULES = (*shape.RULES, *running_ahead.RULES, *learning.RULES)


def check_rules(config: PipelineConfig, root: Node, found: Iterable[Finding] = ()) -> list[Diagnostic]:
    """All findings of all rules and those `found` before, in the order of their ids. `root`: the tree with canonical
    names.
    """
    findings = [
        *found,
        *(finding for rule in _RULES for finding in rule(config)),
    ]
    return sorted((placed(*finding, root) for finding in findings), key=lambda d: d.id)


def placed(id: str, key: str, message: str, root: Node) -> Diagnostic:
    """A finding with its place."""
    return diagnostic(id, key, nearest(root, key.split(".")), message)

"""Cross-field rules C101 to C156: what no single key can break.

Each rule is a generator of (id, key, message); the place of a message is where its key was written, or the nearest
section.
"""

from collections.abc import Iterable

from roll_async.config.rules import learning, running_ahead, shape, supervised
from roll_async.config.rules.contradictions import Finding
from roll_async.config.schema import PipelineConfig, RunConfig, SupervisedConfig
from roll_async.config.yaml.diagnostics import Diagnostic
from roll_async.config.yaml.node import Node, diagnostic, nearest

_OF_ALL = (*shape.OF_ALL_KINDS, *learning.OF_ALL_KINDS)
_RULES = (*shape.RULES, *running_ahead.RULES, *learning.RULES)


def check_rules(config: RunConfig, root: Node, found: Iterable[Finding] = ()) -> list[Diagnostic]:
    """All findings of all rules and those `found` before, in the order of their ids. `root`: the tree with canonical
    names.
    """
    findings = [*found, *(finding for rule in _OF_ALL for finding in rule(config))]
    if isinstance(config, PipelineConfig):
        findings += [finding for rule in _RULES for finding in rule(config)]
    elif isinstance(config, SupervisedConfig):
        findings += [finding for rule in supervised.RULES for finding in rule(config)]
    return sorted((placed(*finding, root) for finding in findings), key=lambda d: d.id)


def placed(id: str, key: str, message: str, root: Node) -> Diagnostic:
    """A finding with its place."""
    return diagnostic(id, key, nearest(root, key.split(".")), message)

"""Load and print a config.

    from roll_async.config.api import load
    config = load("configs/rlvr_config_async.yaml", ["max_steps=10"])

Loading is inert: it reads the named file and its includes, and for the default of dtype the processor's list of
instructions; no environment, device, clock or network.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roll_async.config.loading.build import build
from roll_async.config.loading.check import KIND_CLASSES, Checker
from roll_async.config.loading.references import find_resolved, resolve_references
from roll_async.config.loading.rename import compose, rename
from roll_async.config.loading.resources import ResourceBlocks
from roll_async.config.loading.spec import spec_of
from roll_async.config.rules.contradictions import Finding, without_contradictions
from roll_async.config.rules.every import check_rules
from roll_async.config.rules.warn import find_warnings
from roll_async.config.schema import AgenticConfig, RLVRConfig, RunConfig, SftConfig
from roll_async.config.yaml.compose import read_sources
from roll_async.config.yaml.diagnostics import ConfigError, Diagnostic
from roll_async.config.yaml.emit import dump
from roll_async.config.yaml.node import Node, diagnostic, nearest

__all__ = ["ConfigError", "Diagnostic", "Loaded", "dump", "load", "load_with_warnings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A config and its warnings."""

    config: RunConfig
    warnings: tuple[Diagnostic, ...]
    root: Node
    """What was written, under canonical names and with its places."""

    @property
    def generating(self) -> RLVRConfig | AgenticConfig:
        """The config, of a kind with engines. Raises ConfigError for another."""
        if isinstance(self.config, RLVRConfig | AgenticConfig):
            return self.config
        kind = self.config.pipeline
        message = f"{kind}: such a run has no engines, and this command needs them; it is for roll-async {kind}"
        raise ConfigError((diagnostic("C019", "pipeline", nearest(self.root, ["pipeline"]), message),))


def load(path: str | Path, overrides: Sequence[str] = (), pipeline: str | None = None) -> RLVRConfig | AgenticConfig:
    """The config at `path` with `KEY=VALUE` overrides. `pipeline` fixes the kind: rlvr or agentic.

    Raises ConfigError with every problem of the phase that found one, and for a config without engines.
    """
    return load_with_warnings(path, overrides, pipeline).generating


def load_with_warnings(path: str | Path, overrides: Sequence[str] = (), pipeline: str | None = None) -> Loaded:
    """Like `load`, with the warnings W01 to W12."""
    if pipeline is not None and pipeline not in KIND_CLASSES:
        raise ValueError(f"pipeline {pipeline!r}: expected {' | '.join(KIND_CLASSES)}")
    # The trees of a large file are many small objects without cycles; collecting in between doubles the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _load(Path(path), overrides, pipeline)
    finally:
        if was_enabled:
            gc.enable()


def _load(path: Path, overrides: Sequence[str], pipeline: str | None) -> Loaded:
    sources = read_sources(path, overrides)
    kind, reason = kind_of(sources.as_written(), pipeline)
    if pipeline in ("sft", "dpo"):
        _stop_of_engines(sources.as_written(), pipeline)
    composed = compose(sources, kind)
    warnings = composed.warnings
    _stop_if(composed.errors, warnings)
    root, conflicts = resolve_references(composed.root, composed.moved, composed.doubts)
    # Sections that came in by reference still hold the names they were written under.
    late = rename(root, kind, is_sglang=False)
    blocks = ResourceBlocks(late.root)
    blocks.run()
    warnings = [*warnings, *late.warnings, *blocks.warnings]
    _stop_if([*conflicts, *late.errors, *blocks.errors], warnings)
    root = blocks.root
    checker = Checker(kind, reason)
    values = checker.check(root)
    _stop_if(checker.errors, warnings)
    values["pipeline"] = kind
    found: list[Finding] = []
    if "algorithm" in values:
        values, found = without_contradictions(values)
    config = build(KIND_CLASSES[kind], values, path.stem)
    _stop_if(check_rules(config, root, found), warnings)
    return Loaded(config=config, warnings=tuple([*warnings, *find_warnings(config, root)]), root=root)


def _stop_of_engines(root: Node, pipeline: str) -> None:
    """One line instead of one for each key that such a run does not have."""
    engines = find_resolved(root, ("actor_infer",))
    kind, _ = kind_of(root, None)
    if engines is not None and engines.value is not None and kind not in ("sft", "dpo"):
        message = (
            f"{pipeline} has no engines: remove the section, or start this config, which is {kind}, by roll-async run"
        )
        raise ConfigError((diagnostic("C019", "actor_infer", engines, message),))


def _stop_if(errors: list[Diagnostic], warnings: list[Diagnostic]) -> None:
    if errors:
        raise ConfigError(tuple([*warnings, *errors]))


def kind_of(root: Node, pipeline: str | None) -> tuple[str, str]:
    """Kind of run and why. An unreadable `pipeline` is reported by the check."""
    if pipeline is not None:
        return pipeline, f"the command fixes pipeline {pipeline}"
    written = find_resolved(root, ("pipeline",))
    if written is not None and isinstance(written.value, str) and written.value in KIND_CLASSES:
        return str(written.value), f"pipeline is {written.value}"
    # Worlds decide before prompt files: configs of ROLL name a template in `data_args` beside their worlds.
    for name in ("custom_envs", "train_env_manager"):
        worlds = find_resolved(root, (name,))
        if worlds is not None and worlds.value is not None:
            return "agentic", f"{name} is set"
    if find_resolved(root, ("actor_infer",)) is None:
        for kind, others in (("dpo", (SftConfig, RLVRConfig, AgenticConfig)), ("sft", (RLVRConfig, AgenticConfig))):
            own = spec_of(KIND_CLASSES[kind]).keys() - {name for cls in others for name in spec_of(cls)}
            if name := next((name for name in sorted(own) if find_resolved(root, (name,)) is not None), None):
                return kind, f"{name} is set, and actor_infer is not"
    data = find_resolved(root, ("actor_train", "data_args"))
    if data is not None and data.value is not None:
        return "rlvr", "actor_train.data_args is set"
    return "agentic", "actor_train.data_args is not set"

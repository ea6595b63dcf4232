"""The reference of all keys as Markdown, made from the dataclasses.

python -m tools.config_reference > docs_roll/configuration.md
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from types import ModuleType

from roll_async.config import schema, schema_algorithm, schema_async, schema_rollout, schema_worker
from roll_async.config.fields import Traits
from roll_async.config.loading.names import REFUSED, alias_table
from roll_async.config.loading.spec import FieldSpec, spec_of
from roll_async.config.options import correction_options
from roll_async.config.options.advantage_options import ADVANTAGE_OPTIONS
from roll_async.config.options.policy_loss_options import POLICY_LOSS_OPTIONS
from roll_async.config.yaml.emit import scalar

_HEAD = """# Configuration

One YAML file describes one run;
`roll-async validate FILE` checks it, `roll-async show FILE` prints it with all defaults.
This file is generated: `python -m tools.config_reference > docs_roll/configuration.md`.

- Scalars are those of YAML 1.2: `yes`, `on`, `1:30` are text, `1e-6` is a number. An int is accepted for a float,
  nothing else is converted.
- `defaults: [FILE, ...]` includes files, relative to this one or absolute, or shipped configs by name
  (`fully_async_cpu`); later wins; `_self_` marks the place of this file.
- A relative path is one from the working directory. A model or prompt file that a shipped config names and that is not
  there is looked up in the checkout, so that the demos run from every folder.
- `${a.b}` is the value at that path of the merged file; `vars:` holds free values for it; `$${` is a literal `${`.
- `KEY=VALUE` on the command line sets one key after the merge; `KEY=null` clears it.
- `device_mapping` is a list of ints, `list(range(a,b))`, `range(a,b)`, `range(b)`, or `a-b` b included; null = CPU.
- Times are seconds. *derived* = filled in from other keys while loading; *required* = no default.
- Later wins, whatever the spelling: other names become canonical in each file and each override by itself, before the
  merge. Only one source that gives a key twice with two values is an error (C016). A later `pg_variant`,
  `adv_estimator` or `strategy_name` drops the options that belonged to the choice before.
- `pretrain` and `model_name_or_path` are a folder, a Hugging Face name (`Qwen/Qwen2.5-7B`) or `modelscope://ORG/NAME`;
  prompt files may be `hf://datasets/ORG/NAME/FILE`. The launcher fetches them once, from the local cache first, and
  hands every role the folder.
- `validate`, `show`, `simulate` and the launchers accept the same configs: C001 to C156 are the loader's, C201 a
  setting that is not there yet or has no effect, a dotted path (reward, world, agent, tool) that names nothing, or a
  setting that the named world or tool does not have, read from sources that are not run; C202 devices and transport;
  C203 the model's files against the config (or a table of well-known models): architecture, positions, vocabulary
  against tokenizer, heads and blocks of the engine's kernels, parallel sizes, an adapter instead of a model. A model
  on a hub is checked by the launchers, once it is here.
- C204, a folder or file that is missing, is the launchers' alone. A package that is not installed is C204 of the
  launchers, too, and of `validate` for a config without devices, whose roles are processes of the same machine; one
  with devices may be for another machine: there `validate` warns (W14).

## Coming from an older version

- `cispo_epsilon_low` is 1 by default (no lower bound, as in the paper); write 0.1 for what it was.
- `kimi15` with one optimizer step per batch needs `ratio_base: behaviour`, or its penalty is zero (W10).
- `fully_async/stale_samples_ratio` counts, without `soft_versions`, groups with a token that the freshest weights did
  not sample; ages end when the step takes the group, not when it is trained.
- `algorithm: null` as an override clears keys that a file gave under their short names, too.
- `examples/dapo/runtime_env.yaml` is `runtime_env.yml`; `recipe/dapo/runtime_env.yaml` leads there.

"""
_SECTIONS: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (schema, ("RunConfig", "PipelineConfig", "RLVRConfig", "AgenticConfig")),
    (schema, ("SupervisedConfig", "SftConfig", "DpoConfig", "HeldOutConfig")),
    (schema_worker, (
        "WorkerConfig", "StrategyArguments", "ModelArguments", "TrainingArguments", "GeneratingArguments",
        "DataArguments", "MegatronTrainConfig", "MegatronInferConfig", "VllmConfig", "SglangConfig", "HfInferConfig",
        "TeacherServer",
    )),
    (schema_rollout, (
        "RewardConfig", "JudgeConfig", "SandboxConfig", "ServiceConfig", "EnvConfig", "ToolConfig", "EnvManagerConfig",
        "TrainEnvManagerConfig", "ValEnvManagerConfig", "ValidationConfig", "ValidationSetConfig",
    )),
    (schema_async, ("AsyncTrainingConfig", "StalenessConfig", "InterruptConfig")),
    (schema_algorithm, ("AlgorithmConfig", "FilterGroupsConfig", "OverlongBufferConfig")),
    (correction_options, ("CorrectionOptions", "RejectionRule")),
    (schema_async, ("WeightSyncConfig", "LedgerConfig", "CheckpointConfig", "TrackingConfig", "FaultPolicy")),
)  # fmt: skip

_LISTED = {name for _, names in _SECTIONS for name in names}


def reference() -> str:
    """The whole document."""
    parts = [_HEAD]
    for module, names in _SECTIONS:
        for name in names:
            parts += _section(getattr(module, name), "##")
    parts += ["## pg_options by pg_variant\n\n"]
    for name, cls in POLICY_LOSS_OPTIONS.items():
        parts += _section(cls, "###", name)
    parts += ["## adv_options by adv_estimator\n\n"]
    for name, cls in ADVANTAGE_OPTIONS.items():
        parts += _section(cls, "###", name)
    parts += ["## Properties\n\n", *_properties(schema.RunConfig, schema.PipelineConfig), "\n", *_other_names()]
    return "".join(parts)


def _section(cls: type, level: str, title: str = "") -> Iterator[str]:
    text = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
    yield f"{level} {title or cls.__name__}\n\n{text}\n\n"
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):  # a base with a section of its own is not repeated
        if base is cls or is_dataclass(base) and base.__name__ not in _LISTED:
            docs |= field_docs(base)
    rows = [_row(f, spec_of(cls)[f.name], docs[f.name]) for f in fields(cls) if f.name in docs]  # type: ignore[arg-type]
    if rows:
        yield "| key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows) + "\n"


def field_docs(cls: type) -> dict[str, str]:
    """Docstring lines under the fields that the class itself declares."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, after in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            assert isinstance(statement.target, ast.Name)
            docs[statement.target.id] = " ".join(str(after.value.value).split())
    return docs


def _row(f: Field, spec: FieldSpec, doc: str) -> str:
    traits = f.metadata.get("traits", Traits())
    notes = [f"Range: {traits.range}."] if traits.range else []
    notes += [f"Roles: {', '.join(traits.roles)}."] if traits.roles else []
    notes += ["Megatron strategies."] if traits.megatron else []
    cells = (f"`{f.name}`", _type_text(spec), _default_text(f, spec), " ".join([doc, *notes]))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _type_text(spec: FieldSpec) -> str:
    optional = "?" if spec.nullable and not spec.traits.derived else ""
    match spec.kind:
        case "choice":
            text = ", ".join(str(c) for c in spec.choices)
        case "list":
            assert spec.item is not None
            one_or_more = spec.traits.form == "one or more"
            text = f"{_type_text(spec.item)}; one, or a list" if one_or_more else f"list of {_type_text(spec.item)}"
        case "map":
            assert spec.item is not None
            text = f"map of {_type_text(spec.item)}"
        case "section":
            assert spec.section is not None
            text = " or ".join(cls.__name__ for cls in (spec.section, spec.other) if cls is not None)
        case "chosen":
            text = f"by {spec.traits.chosen_by}"
        case "any":
            text = "map"
        case "files":
            text = "str or list of str"
        case other:
            text = other
    return text + optional


def _default_text(f: Field, spec: FieldSpec) -> str:
    if spec.required:
        return "required"
    if spec.traits.derived:
        return "derived"
    if f.default is not MISSING:
        return f"`{scalar(f.default)}`"
    made = f.default_factory() if f.default_factory is not MISSING else None
    if made is None or is_dataclass(made):
        return "its defaults"
    if isinstance(made, dict):
        return "`{" + ", ".join(made) + "}`"
    assert isinstance(made, tuple)
    return f"`[{', '.join(made)}]`"


def _properties(*classes: type) -> Iterator[str]:
    yield "Computed from the keys; `roll-async show` prints them as comments.\n\n| property | meaning |\n|---|---|\n"
    members = {name: member for cls in classes for name, member in vars(cls).items()}
    for name, member in members.items():
        if isinstance(member, property):
            yield f"| `{name}` | {inspect.cleandoc(member.__doc__ or '')} |\n"


def _other_names() -> Iterator[str]:
    yield "## Other names\n\nAccepted with warning W01.\n\n| written | means |\n|---|---|\n"
    for source, targets in alias_table("rlvr").items():
        yield f"| `{source}` | {', '.join(f'`{t}`' for t in targets)} |\n"
    yield "\nKeys of ROLL and verl that are refused (C002).\n\n| key | reason |\n|---|---|\n"
    for key, reason in REFUSED.items():
        yield f"| `{key}` | {reason} |\n"


if __name__ == "__main__":
    sys.stdout.write(reference())

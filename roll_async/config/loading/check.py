"""Keys, types, choices and ranges (C001 to C020): a tree of nodes to plain values that fit the dataclasses.

Only what is written comes out; defaults are left to the dataclasses. All errors are collected.
"""

from collections.abc import Iterable
from dataclasses import replace

from roll_async.config.fields import RANGES
from roll_async.config.loading.devices import parse_devices
from roll_async.config.loading.names import FOREIGN_SECTIONS, REFUSED, refusal
from roll_async.config.loading.spec import CHOSEN_CLASSES, CHOSEN_DEFAULTS, OWN_CLASSES, FieldSpec, spec_of
from roll_async.config.schema import ROLES, AgenticConfig, DpoConfig, RLVRConfig, RunConfig, SftConfig
from roll_async.config.schema_async import TRACKER_NAMES, FaultPolicy
from roll_async.config.schema_rollout import REWARDS, WORLDS, reads_answers
from roll_async.config.schema_worker import STRATEGY_ROLES, DataArguments
from roll_async.config.yaml.diagnostics import MAX_DIAGNOSTICS, Diagnostic, shown
from roll_async.config.yaml.node import Node, Plain, diagnostic, leaves, plain, type_name
from roll_async.config.yaml.paths import METRIC_KEY, NAME, PathIndex
from roll_async.config.yaml.scalars import check_scalar, has_type, remedy
from roll_async.config.yaml.suggest import closest, foreign_character

KIND_CLASSES: dict[str, type[RunConfig]] = {
    "rlvr": RLVRConfig,
    "agentic": AgenticConfig,
    "sft": SftConfig,
    "dpo": DpoConfig,
}
_FAULTS_OF_ENGINES = ("env_", "request_", "sample_", "max_engine_", "max_failed_")
WITHOUT_EFFECT_ON_GIVEN_ROWS = frozenset(
    {
        *(f"actor_train.data_args.{key}" for key in ("id", "tag", "ground_truth", "domain_interleave_probs")),
        *(f"validation.data_args.{key}" for key in ("id", "tag", "ground_truth", "domain_interleave_probs")),
        "actor_train.data_args.preprocessing_num_workers",
        "validation.data_args.preprocessing_num_workers",
        "actor_train.router_replay",
        "tracking.rollout_dump_dir",
        *(f"fault.{key}" for key in spec_of(FaultPolicy) if key.startswith(_FAULTS_OF_ENGINES)),
    }
)
"""Keys of sections that all kinds have, which only runs with engines read."""
_MAX_SUGGESTIONS = 50  # a search compares the name with all keys
_DATA, _OF_AGENTS = "actor_train.data_args", "template_kwargs"
"""A section, and the one key of it that agentic configs have: their prompts come from worlds, not from files."""
_REMEDIES = {
    "pretrain": "give a Hugging Face name or a folder",
    "actor_train": "add the section",
    "actor_infer": "add the section",
    "data_args": "give the prompt files in data_args.file_name",
    "strategy_args": "give strategy_name and strategy_config",
}


class Checker:
    """Checks one file of one kind."""

    def __init__(self, kind: str, reason: str) -> None:
        self.errors: list[Diagnostic] = []
        self._kind, self._reason = kind, reason
        self._paths = PathIndex(KIND_CLASSES[kind])
        self._num_suggested = 0
        self._folders = ("/",) if kind in ("sft", "dpo") else ()
        """How a name of data ends that is a folder of samples."""

    def check(self, root: Node) -> dict[str, Plain]:
        """Plain values of the whole file."""
        values = self._section(root, KIND_CLASSES[self._kind], "", "")
        if self._kind != "agentic":
            self._data_args(root)
        return values

    def _error(self, id: str, path: str, node: Node, message: str) -> None:
        if len(self.errors) < MAX_DIAGNOSTICS:
            self.errors.append(diagnostic(id, path or "(file)", node, message))

    # ---- sections -------------------------------------------------------------------------------------------------

    def _section(self, node: Node, cls: type, path: str, role: str) -> dict[str, Plain]:
        """Values of one dataclass; `role` is the role the section belongs to, or empty."""
        assert isinstance(node.value, dict)
        spec, values = spec_of(cls), {}
        for name, child in node.value.items():
            here = f"{path}.{name}" if path else name
            if name not in spec:
                self._unknown(here, name, child, cls, path)
            elif not self._misplaced(spec[name], here, child, node, role):
                role_here = role or ("" if path else "teacher" if name == "teachers" else name if name in ROLES else "")
                value = self._value(child, spec[name], here, role_here, node)
                if value is not _ABSENT:
                    values[name] = value
        if cls is DataArguments and self._kind == "agentic":
            values["file_name"] = []  # worlds ask, no file does
        for name, field in spec.items():
            if field.required and name not in node.value and name not in values:
                self._error("C006", f"{path}.{name}" if path else name, node, _missing(name))
        if cls.__name__ == "WorkerConfig":
            self._strategy_role(node, path, role or path)
        elif cls is DataArguments:
            self._columns(node, path)
        return values

    def _value(self, node: Node, spec: FieldSpec, path: str, role: str, parent: Node) -> Plain:
        """The value of one key, `_ABSENT` if the default holds or an error was reported."""
        if node.value is None:
            if spec.nullable:
                return _ABSENT if spec.traits.derived else None
            if node.from_override:  # KEY=null clears: the default holds
                if spec.required:
                    self._error("C006", path, node, _missing(spec.name))
                return _ABSENT
        match spec.kind:
            case "devices":
                return self._devices(node, path)
            case "files":
                return self._files(node, path)
            case "section":
                assert spec.section is not None
                return self._section(node, spec.section, path, role) if self._is(node, dict, "map", path) else _ABSENT
            case "chosen":
                return self._chosen(node, spec, path, parent)
            case "any":
                return self._any(node, path) if self._is(node, dict, "map", path) else _ABSENT
            case "list":
                return self._list(node, spec, path, role)
            case "map":
                return self._map(node, spec, path, role)
            case _:
                return self._scalar(node, spec, path)

    def _is(self, node: Node, wanted: type, name: str, path: str) -> bool:
        if isinstance(node.value, wanted):
            return True
        hint = "; write a list of items" if wanted is list else remedy(name, node.value)
        self._error("C003", path, node, f"expected {name}, got {type_name(node)} {shown(plain(node))}{hint}")
        return False

    def _chosen(self, node: Node, spec: FieldSpec, path: str, parent: Node) -> Plain:
        """A section whose class a sibling picks. It is not checked when the sibling is unreadable."""
        classes = CHOSEN_CLASSES[spec.traits.chosen_by]
        assert isinstance(parent.value, dict)
        chooser = parent.value.get(spec.traits.chosen_by)
        default = CHOSEN_DEFAULTS.get(spec.traits.chosen_by)
        name = default if chooser is None or (chooser.value is None and chooser.from_override) else chooser.value
        if not self._is(node, dict, "map", path) or not isinstance(name, str):
            return _ABSENT
        if name not in classes:
            own = OWN_CLASSES.get(spec.traits.chosen_by)
            return self._own(node, own, path) if own is not None and _is_dotted_path(name) else _ABSENT
        cls = classes[name]
        values = self._section(node, cls, path, "")
        extra = values.get("extra")
        for key in extra if isinstance(extra, dict) else ():
            if key in spec_of(cls):
                assert isinstance(node.value, dict)
                self._error(
                    "C001", f"{path}.extra.{key}", node.value["extra"], f"unknown key; did you mean '{path}.{key}'?"
                )
        return values

    def _own(self, node: Node, cls: type, path: str) -> Plain:
        """Options of a user's own code: our keys are checked here, the others when the code is there."""
        assert isinstance(node.value, dict)
        ours = spec_of(cls).keys() - {"given"}
        known = {name: child for name, child in node.value.items() if name in ours}
        theirs = {name: child for name, child in node.value.items() if name not in ours}
        given = self._any(Node(theirs, node.file, node.line), path)
        return {**self._section(Node(known, node.file, node.line), cls, path, ""), "given": given}

    def _list(self, node: Node, spec: FieldSpec, path: str, role: str) -> Plain:
        if spec.traits.form == "one or more" and not isinstance(node.value, list):
            assert spec.item is not None
            return [self._value(node, spec.item, path, role, node)]
        if not self._is(node, list, "list", path):
            return _ABSENT
        assert isinstance(node.value, list) and spec.item is not None
        values = [self._value(item, spec.item, f"{path}.{i}", role, node) for i, item in enumerate(node.value)]
        # As text: an item of a wrong type may have no hash.
        if spec.traits.form == "one or more" and len({str(plain(item)) for item in node.value}) < len(values):
            self._error("C005", path, node, f"{shown(plain(node))} must be each name once")
        return values

    def _map(self, node: Node, spec: FieldSpec, path: str, role: str) -> Plain:
        if not self._is(node, dict, "map", path):
            return _ABSENT
        assert isinstance(node.value, dict) and spec.item is not None
        values, form = {}, METRIC_KEY if path == "tracking.alarms" else NAME
        for name, child in node.value.items():
            if child.value is None and spec.item.section is not None:
                continue  # what an included file has, and this one takes out
            if not form.fullmatch(name):
                self._error("C005", path, child, f"{shown(name)} must be a name matching {form.pattern}")
            item, other = spec.item, spec.item.other
            if other is not None and isinstance(child.value, dict) and child.value:
                written = child.value.keys()
                if next(iter(spec_of(other))) in written or not written & spec_of(item.section).keys():
                    item = replace(item, section=other)
            values[name] = self._value(child, item, f"{path}.{name}", role, node)
            if path == "rewards":
                self._reward(name, child, f"{path}.{name}", values[name])
            elif path == "custom_envs":
                self._named_type(child, values[name], f"{path}.{name}.env_type", WORLDS)
        return values

    # ---- scalars and special forms --------------------------------------------------------------------------------

    def _scalar(self, node: Node, spec: FieldSpec, path: str) -> Plain:
        value = node.value
        wanted = spec.kind if spec.kind != "choice" else type(spec.choices[0]).__name__
        if not has_type(value, wanted):
            hint = remedy(wanted, value)
            if path == "async_training.staleness.soft_versions" and isinstance(value, float):
                hint = "; it counts weight versions; for a fraction of a batch use async_generation_ratio"
            self._error("C003", path, node, f"expected {wanted}, got {type_name(node)} {shown(plain(node))}{hint}")
            return _ABSENT
        assert not isinstance(value, list | dict)
        if spec.kind == "choice":
            is_own = spec.traits.form == "own code" and isinstance(value, str) and _is_dotted_path(value)
            if value not in spec.choices and not is_own:
                self._choice(path, node, str(value), [str(c) for c in spec.choices])
                return _ABSENT
            return value
        if problem := check_scalar(value):
            self._error("C005", path, node, f"{shown(value)} must be {problem}")
            return _ABSENT
        if spec.kind == "float":
            assert isinstance(value, int | float)
            value = float(value)
        if spec.traits.range is not None and isinstance(value, int | float) and not RANGES[spec.traits.range](value):
            self._error("C005", path, node, f"{shown(node.value)} must be {spec.traits.range}")
            return _ABSENT
        return value

    def _choice(self, path: str, node: Node, value: str, choices: list[str]) -> None:
        near = closest(value, choices)
        hint = f"; did you mean '{near}'?" if near else ""
        message = f"{shown(plain(node))} is not one of {' | '.join(choices)}{hint}"
        self._error("C004", path, node, message + foreign_character(value))

    def _any(self, node: Node, path: str) -> Plain:
        """A map that is passed on unchanged. Checked are its numbers, and that what is for one tracker is a map."""
        assert isinstance(node.value, dict)
        for name in TRACKER_NAMES if path == "tracking.tracker_kwargs" else ():
            if name in node.value:
                self._is(node.value[name], dict, "map", f"{path}.{name}")
        for here, leaf in leaves(node, path):
            for value in leaf.value if isinstance(leaf.value, list) else [leaf]:
                if not isinstance(value.value, list | dict) and (problem := check_scalar(value.value)):
                    self._error("C005", here, value, f"{shown(value.value)} must be {problem}")
        return plain(node)

    def _devices(self, node: Node, path: str) -> Plain:
        value = plain(node)
        ids, problem = parse_devices(value)
        if ids is not None:
            return list(ids)
        if problem:
            self._error("C018", path, node, f"{shown(value)}: {problem}")
        else:
            forms = "write a list of ints, list(range(a,b)), range(a,b) or a-b"
            self._error("C017", path, node, f"{shown(value)} is not a device list; {forms}")
        return _ABSENT

    def _files(self, node: Node, path: str) -> Plain:
        items = node.value if isinstance(node.value, list) else [node]
        names: list[Plain] = []
        for index, item in enumerate(items):
            here = f"{path}.{index}" if items is node.value else path
            if not isinstance(item.value, str):
                hint = remedy("str", item.value)
                self._error("C003", here, item, f"expected str, got {type_name(item)} {shown(plain(item))}{hint}")
            elif not item.value.endswith((".json", ".jsonl", ".parquet", *self._folders)):
                self._error("C005", here, item, f"{shown(item.value)} must be a .json, .jsonl or .parquet file")
            else:
                names.append(item.value)
        if not items:
            self._error("C005", path, node, "[] must be at least one file")
        return names

    # ---- rules about single sections ------------------------------------------------------------------------------

    def _misplaced(self, spec: FieldSpec, path: str, child: Node, section: Node, role: str) -> bool:
        """Whether the key has no effect on this role (C020), or on this kind (C019)."""
        if self._kind in ("sft", "dpo") and path in WITHOUT_EFFECT_ON_GIVEN_ROWS:
            self._error("C020", path, child, f"has no effect on {self._kind} configs; remove it")
            return True
        if self._kind == "agentic" and path.startswith(_DATA) and child.value is not None:
            holds_it = path == _DATA and isinstance(child.value, dict) and _OF_AGENTS in child.value
            if not holds_it and path != f"{_DATA}.{_OF_AGENTS}":
                self._foreign_kind(path, child, "rlvr")
                return True
        owner = role or path.split(".")[0]
        misplaced = bool(spec.traits.roles) and owner not in spec.traits.roles and owner in ROLES
        if spec.traits.megatron and not misplaced:
            assert isinstance(section.value, dict)
            args = section.value.get("strategy_args")
            name = args.value.get("strategy_name") if args is not None and isinstance(args.value, dict) else None
            misplaced = name is not None and isinstance(name.value, str) and not name.value.startswith("megatron_")
        if misplaced:
            self._error("C020", path, child, f"has no effect on role {owner}; remove it")
        return misplaced

    def _strategy_role(self, node: Node, path: str, role: str) -> None:
        assert isinstance(node.value, dict)
        args = node.value.get("strategy_args")
        if args is None or not isinstance(args.value, dict):
            return
        name = args.value.get("strategy_name")
        if name is not None and isinstance(name.value, str) and role not in STRATEGY_ROLES.get(name.value, (role,)):
            where, fitting = (
                f"{path}.strategy_args.strategy_name",
                next(s for s, r in STRATEGY_ROLES.items() if role in r),
            )
            self._error("C020", where, name, f"has no effect on role {role}; use {fitting}")

    def _columns(self, node: Node, path: str) -> None:
        assert isinstance(node.value, dict)
        prompt, messages = node.value.get("prompt"), node.value.get("messages")
        if prompt is not None and messages is not None and isinstance(prompt.value, str) and messages.value is not None:
            self._error("C005", f"{path}.prompt", prompt, f"{shown(prompt.value)} must be null while messages is set")

    def _data_args(self, root: Node) -> None:
        assert isinstance(root.value, dict)
        actor = root.value.get("actor_train")
        if actor is not None and isinstance(actor.value, dict):
            data = actor.value.get("data_args")
            if data is None or data.value is None:
                self._error("C006", "actor_train.data_args", data or actor, _missing("data_args"))

    def _reward(self, domain: str, node: Node, path: str, values: Plain) -> None:
        if not isinstance(values, dict) or not isinstance(node.value, dict):
            return
        kind = values.get("type")
        if (
            kind is None
            and "type" not in values
            and (node.value.get("type") is None or node.value["type"].value is None)
        ):
            kind = domain if domain in REWARDS else None
            if kind is None:
                message = f"required and not set; give one of {' | '.join(REWARDS)} or a dotted path"
                self._error("C006", f"{path}.type", node, message)
                return
        self._named_type(node, values, f"{path}.type", REWARDS)
        for key, owner in (("judge", "llm_judge"), ("sandbox", "code_sandbox"), ("service", "math_service")):
            if values.get(key) is not None and kind != owner:
                self._error("C020", f"{path}.{key}", node.value[key], f"has no effect on role {kind}; remove it")
        if values.get("answer_format", "auto") != "auto" and isinstance(kind, str) and not reads_answers(kind):
            message = f"has no effect on role {kind}; remove it"
            self._error("C020", f"{path}.answer_format", node.value["answer_format"], message)
        if kind in ("llm_judge", "math_service") and values.get("num_workers", 1) != 1:
            message = f"has no effect on role {kind}; remove it, or set max_concurrent"
            self._error("C020", f"{path}.num_workers", node.value["num_workers"], message)
        if kind == "llm_judge" and values.get("judge") is None:
            self._error("C006", f"{path}.judge", node, "required and not set; give api_url and model")
        if kind == "math_service" and values.get("service") is None:
            self._error("C006", f"{path}.service", node, "required and not set; give api_url")

    def _named_type(self, node: Node, values: Plain, path: str, names: Iterable[str]) -> None:
        """A built-in name or a dotted path to user code."""
        key = path.rpartition(".")[2]
        value = values.get(key) if isinstance(values, dict) else None
        if isinstance(value, str) and value not in names and not _is_dotted_path(value):
            assert isinstance(node.value, dict)
            self._choice(path, node.value[key], value, list(names))

    # ---- unknown keys ---------------------------------------------------------------------------------------------

    def _unknown(self, path: str, name: str, node: Node, cls: type, section: str) -> None:
        others = [kind for kind, cls in KIND_CLASSES.items() if not section and name in spec_of(cls)]
        if others and (not refusal(path) or self._kind not in ("rlvr", "agentic")):
            self._foreign_kind(path, node, " and ".join(others))
        elif not section and name in FOREIGN_SECTIONS:
            for here, leaf in leaves(node, path):
                near = self._paths.close(here.rpartition(".")[2])
                reason = refusal(here) or (f"the nearest key is {near}" if near else "remove it")
                self._error("C002", here, leaf, f"not a key of roll_async: {reason}")
        elif not section and name == "checkpoint_config" and isinstance(node.value, dict) and "type" in node.value:
            message = f"not a key of roll_async: {REFUSED['checkpoint_config.type']}"
            self._error("C002", f"{path}.type", node.value["type"], message)
        elif reason := refusal(path):
            self._error("C002", path, node, f"not a key of roll_async: {reason}")
        else:
            self._error("C001", path, node, f"unknown key; {self._hint(name, cls, section)}{foreign_character(name)}")

    def _hint(self, name: str, cls: type, section: str) -> str:
        names = list(spec_of(cls)) + (["defaults", "vars"] if not section else [])
        self._num_suggested += 1
        if self._num_suggested <= _MAX_SUGGESTIONS:
            near = closest(name, names)
            if near:
                return f"did you mean '{section}.{near}'?" if section else f"did you mean '{near}'?"
            found = self._paths.close(name)
            if found is not None and found.rpartition(".")[0] != section:
                return f"did you mean '{found}'?"
        return f"{section or 'the file'} has: {', '.join(names) or 'no keys'}"

    def _foreign_kind(self, path: str, node: Node, other: str) -> None:
        message = f"is a key of {other} configs; this one is {self._kind} because {self._reason}"
        self._error("C019", path, node, message)


class _Absent:
    """Marks a key whose default applies."""


_ABSENT: Plain = _Absent()  # type: ignore[assignment]


def _missing(name: str) -> str:
    return f"required and not set; {_REMEDIES.get(name, 'add it')}"


def _is_dotted_path(text: str) -> bool:
    parts = text.split(".")
    return len(parts) > 1 and all(p.isidentifier() for p in parts)

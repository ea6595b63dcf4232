"""How far it is from the start script to what a reader looks for, and how many files a change touches."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from roll_async.config.options.advantage_options import ADVANTAGE_OPTIONS
from roll_async.config.options.policy_loss_options import POLICY_LOSS_OPTIONS
from roll_async.config.schema import AgenticConfig, RLVRConfig
from roll_async.config.yaml.paths import keys
from roll_async.inference.backends import ENGINES
from tools.figures import circles, figures

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "roll_async"

START = "examples/start_rlvr_pipeline.py"
TO_THE_LOOP = (
    (START, "launch("),
    ("roll_async/commands/run.py", "pipeline.run()"),
    ("roll_async/pipelines/rlvr.py", "async def _run("),
)
"""(file, what it calls of the next one). Protocols are followed to the classes that `wire` couples."""
TO_A_WEIGHT_PUSH = (
    *TO_THE_LOOP[:-1],
    ("roll_async/pipelines/rlvr.py", "synchronizer.push("),
    ("roll_async/weight_sync/push.py", "async def push("),
)
TO_THE_LOSS = (
    *TO_THE_LOOP[:-1],
    ("roll_async/pipelines/rlvr.py", "learner.learn("),
    ("roll_async/trainer/learner.py", "actor.update_policy("),
    ("roll_async/cluster/roles/trainer_group.py", '@served({"_worker": WorkerCalls}'),  # Ray's border
    ("roll_async/trainer/megatron/worker.py", "policy_loss("),
    ("roll_async/algorithms/objective.py", "policy_loss_function("),
)


def files_that_name(pattern):
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    return {name for name, text in texts.items() if re.search(rf"\b({pattern})", text)}


def hops(chain):
    """Files after the start script; every one must really hand over to the next."""
    for file, call in chain:
        assert call in (ROOT / file).read_text(), f"{file} does not say {call}"
    return len(chain) - 1


def test_the_loop_is_two_files_from_the_start_script_a_weight_push_three_and_the_loss_six():
    assert hops(TO_THE_LOOP) == 2
    assert hops(TO_A_WEIGHT_PUSH) == 3
    assert hops(TO_THE_LOSS) == 6


LIMITS = {
    "lines": 75_540,
    "classes": 843,
    "dataclasses": 388,
    "protocols": 65,
    "functions per 1,000 lines": 68.5,
    "class names with two meanings": 0,
    "circles of imports": 0,
    "most files in a folder": 14,
    "longest file": 660,
}
"""What a reader must hold at once, never more than today. The plan wants 49,000 lines, 640 classes, 290 dataclasses and
50 protocols. Lowering a limit is a commit of its own; so is raising one, with what the lines buy.
"""


def test_what_a_reader_must_hold_at_once_does_not_grow():
    found = figures()
    print(*(f"{name:30} {found[name]:>10,}  limit {LIMITS.get(name, '-')}" for name in found), sep="\n")
    assert {name: found[name] for name, limit in LIMITS.items() if found[name] > limit} == {}
    assert circles() == []


def test_a_class_name_has_one_meaning():
    where = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    doubles = {name: places for name, places in where.items() if len(places) > 1}
    assert doubles == {}


FROM_COMMAND_TO_LOOP = (
    "commands/run.py", "launch/restarts.py", "launch/run.py", "launch/roles.py", "launch/rollout.py",
    "pipelines/wire.py",
)  # fmt: skip
BUNDLES = {
    "UserHooks": "what a start script may replace; the command is given it, launch and wire read it",
    "StartedRollout": "what runs before there is a run, in the driver or in the rollout process; it may serve several",
    "Engines": "a pool of replicas and what restarts them; a run has one or two",
    "RolloutParts": "of what wire builds the rollout side, for launcher, simulator and tests alike",
    "RolloutSide": "what the loop asks of the rollout side: objects here, their clients where these are in a process",
    "PipelineParts": "what the loop holds, each behind a protocol, so that fakes take its place on the virtual clock",
    "RunPlan": "steps and intervals of the loop, which knows no config: simulated worlds have none",
    "LearnerParts": "the groups of ranks of a step by role, and how their calls go together",
}
"""Every dataclass that is handed on between the command and the loop, with the reason that it exists. A ninth takes the
place of one that goes.
"""


def annotated(node):
    """What the signature of a function names."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return " ".join(ast.unparse(a) for a in [*(a.annotation for a in arguments), node.returns] if a is not None)


def test_what_is_handed_from_the_command_to_the_loop_are_eight_bundles_at_most():
    homes = [*PACKAGE.glob("launch/*.py"), *PACKAGE.glob("pipelines/*.py"), *PACKAGE.glob("cluster/roles/*.py")]
    bundles = {
        node.name
        for path in (*homes, PACKAGE / "trainer" / "roles.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    }
    named = " ".join(
        annotated(node)
        for name in FROM_COMMAND_TO_LOOP
        for node in ast.walk(ast.parse((PACKAGE / name).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert bundles & set(re.findall(r"\w+", named)) == BUNDLES.keys()
    assert len(BUNDLES) <= 8


def files_of_options(table, at_home):
    """By choice, the files that name its options class beside those where every such class is."""
    found = {name: files_that_name(cls.__name__) - at_home for name, cls in table.items()}
    return {name: files for name, files in found.items() if files}


def test_a_loss_is_two_files_and_an_estimator_too():
    """More where the config warns of a loss, where a section begins as one, and where a loss chooses tokens from the
    whole batch.
    """
    at_home = {"algorithms/policy_losses.py", "config/options/policy_loss_options.py"}
    chooses = {"algorithms/token_selection.py", "trainer/selection.py"}
    warned = {"config/rules/warn.py"}
    assert files_of_options(POLICY_LOSS_OPTIONS, at_home) == {
        "ppo": {"config/schema_algorithm.py"}, "decoupled_ppo": warned, "kimi15": warned,
        "clip_cov": chooses, "kl_cov": chooses | warned, "m2po": chooses,
    }  # fmt: skip
    at_home = {"algorithms/advantages.py", "config/options/advantage_options.py"}
    default = {"config/schema_algorithm.py"}
    assert files_of_options(ADVANTAGE_OPTIONS, at_home) == {"grpo": default, "grpo_passk": default}


def test_a_config_key_is_named_in_three_files_mostly():
    """Over all keys whose name is no plain word. Names of other programs, which are aliases, do not count, nor does
    the first config that `roll-async new` writes and the card that `publish` writes.
    """
    words = {
        str(path.relative_to(PACKAGE)): set(re.findall(r"\w+", path.read_text()))
        for path in PACKAGE.rglob("*.py")
        if path.name not in ("names.py", "porting.py", "rename.py", "template.py", "model_card.py")
    }
    last = {key.rpartition(".")[2] for kind in (RLVRConfig, AgenticConfig) for key in keys(kind)}
    counts = sorted(sum(key in names for names in words.values()) for key in last if "_" in key)
    assert len(counts) > 200 and counts[len(counts) // 2] <= 4


def test_a_config_key_is_its_schema_line_and_the_class_that_uses_it():
    assert files_that_name("whiten_advantages") == {"config/schema_algorithm.py", "trainer/learner.py"}
    also_without_section = "config/loading/names.py"
    synchronizer = {"config/schema_async.py", "weight_sync/protocol.py"}
    assert files_that_name("sync_retry_delay") == {*synchronizer, also_without_section}
    assert len(files_that_name("max_run_restarts")) <= 3
    assert len(files_that_name("max_engine_restarts")) <= 3


def test_a_counter_is_counted_in_one_file_and_listed_in_the_documents():
    listed = (ROOT / "docs_roll" / "metrics.md").read_text()
    examples = {
        "agent/lost_world_processes": "agents/worlds.py",
        "router/agreement": "trainer/megatron/model/router_replay.py",
        "trainer/tflops_per_device": "trainer/megatron/worker.py",
    }
    for key, file in examples.items():
        assert files_that_name(key) == {file} and f"`{key}`" in listed


def test_an_engine_is_its_file_its_line_among_the_backends_and_its_section_of_the_config():
    for strategy, path in ENGINES.items():
        module, name = path.rsplit(".", 1)
        file = f"{module.removeprefix('roll_async.').replace('.', '/')}.py"
        assert files_that_name(rf"{name}[:\"(]") == {file, "inference/backends.py"}
        assert files_that_name(rf'{strategy}": \(') == {"config/schema_worker.py"}  # the roles that it may have


def test_an_except_for_everything_gives_its_reason_at_the_line_and_outside_user_code_raises_again():
    # Elsewhere user code is asked through `observe/outside.py: border`.
    user_code = ("algorithms/own_code.py", "rewards/", "inference/vllm/in_process.py", "commands/run.py")
    found = 0
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"BaseException"}
            if names & {"Exception", "BaseException"}:
                found += 1
                where = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                assert re.search(r"  # \S+ \S+", lines[node.lineno - 1]), f"{where}: no reason"
                raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
                assert raises or where.startswith(user_code), f"{where}: hides errors of our own"
    assert found > 20

"""The later source wins, whatever the spelling of either; a new choice drops the options of the old one."""

import json
from pathlib import Path

import pytest

from roll_async.config.api import ConfigError, load
from roll_async.config.loading.names import SGLANG_ALIASES, alias_table
from roll_async.config.loading.rename import compose
from roll_async.config.schema import RLVRConfig
from roll_async.config.yaml.compose import read_sources
from roll_async.config.yaml.node import find, plain
from roll_async.config.yaml.yaml_text import parse

ROOT = Path(__file__).resolve().parents[3]
STRATEGY = "actor_infer.strategy_args"
SHIPPED = [p for p in sorted((ROOT / "configs").rglob("*.yaml")) if not p.stem.startswith(("sft_", "dpo_"))]
VALUES = {  # of keys that do not take every number
    "loss_agg_mode": ("seq-mean-token-mean", "token-mean"), "pg_variant": ("tis", "gspo"),
    "attn_implementation": ("sdpa", "auto"), "track_with": ("stdout", "wandb"), "rollout_dump_dir": ("./a", "./b"),
    "resume_from": ("latest", "./a"), "output_dir": ("./a", "./b"), "tracker_kwargs": ("{a: 1}", "{a: 2}"),
    "overlong_buffer": ("{len: 7}", "{len: 8}"),
}  # fmt: skip


def kind(path: Path) -> str:
    return "rlvr" if isinstance(load(path), RLVRConfig) else "agentic"


def values(canonical: str) -> tuple[str, str]:
    return VALUES.get(canonical.rpartition(".")[2], ("3", "4"))


def rounds(table: dict[str, tuple[str, ...]]) -> list[dict[str, tuple[str, ...]]]:
    """The aliases in rounds, so that no two of one round mean the same key."""
    result: list[dict[str, tuple[str, ...]]] = []
    for alias, targets in table.items():
        fits = (r for r in result if not {t for ts in r.values() for t in ts} & set(targets))
        place = next(fits, None)
        if place is None:
            result.append(place := {})
        place[alias] = targets
    return result


def tree_of(path, overrides, kind):
    composed = compose(read_sources(path, overrides), kind)
    assert not composed.errors
    return composed.root


def value_at(root, dotted: str):
    node = find(root, dotted.split("."))
    node = find(node, ("len",)) if dotted.endswith("overlong_buffer") else node
    return plain(node)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_alias_overrides_and_is_overridden(path):
    run = kind(path)
    for aliases in rounds(alias_table(run)):
        pairs = [(alias, target) for alias, targets in aliases.items() for target in targets]
        for turned in (False, True):
            first = [f"{t if turned else a}={values(t)[0]}" for a, t in pairs]
            second = [f"{a if turned else t}={values(t)[1]}" for a, t in pairs]
            root = tree_of(path, [*first, *second], run)
            for alias, target in pairs:
                expected = parse(values(target)[1], "")
                expected = find(expected, ("len",)) if target.endswith("overlong_buffer") else expected
                assert value_at(root, target) == plain(expected), (alias, target, turned)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_alias_in_a_file_overrides_the_files_it_includes(path, tmp_path):
    run = kind(path)
    base = "/".join([".."] * len(tmp_path.parts[1:])) + str(path)
    for aliases in rounds(alias_table(run)):
        over, tree = tmp_path / "over.yaml", {"defaults": [base]}
        for alias, targets in aliases.items():
            *above, last = alias.split(".")
            section = tree
            for key in above:
                section = section.setdefault(key, {})
            section[last] = plain(parse(values(targets[0])[1], ""))
        over.write_text(json.dumps(tree, indent=1))
        root = tree_of(over, [], run)
        for alias, targets in aliases.items():
            for target in targets:
                expected = parse(values(target)[1], "")
                expected = find(expected, ("len",)) if target.endswith("overlong_buffer") else expected
                assert value_at(root, target) == plain(expected), (alias, target)


def test_sizes_under_sglang_names():
    overrides = ["actor_infer.strategy_args.strategy_name=sglang", "actor_infer.device_mapping=16-23"]
    key = "actor_infer.strategy_args.strategy_config"
    for alias, (canonical,) in SGLANG_ALIASES.items():
        for pair in ((f"{alias}=4", f"{canonical}=2"), (f"{canonical}=4", f"{alias}=2")):
            config = load(ROOT / "configs/rlvr_config_async.yaml", [*overrides, *pair])
            assert getattr(config.actor_infer.strategy_args.strategy_config, canonical.removeprefix(f"{key}.")) == 2


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("pg_variant=tis", lambda c: c.algorithm.pg_variant == "tis"),
        ("pg_variant=gspo", lambda c: c.algorithm.pg_options.clip_low == 3e-4),
        ("adv_estimator=rloo", lambda c: c.algorithm.adv_estimator == "rloo"),
        (f"{STRATEGY}.strategy_name=vllm", lambda c: c.actor_infer.strategy_args.strategy_name == "vllm"),
        (f"{STRATEGY}.strategy_name=sglang", lambda c: c.actor_infer.strategy_args.strategy_name == "sglang"),
        ("staleness_threshold=5", lambda c: c.async_training.staleness.soft_versions == 5),
        ("max_running_requests=17", lambda c: c.async_training.max_concurrent_per_server == 17),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_one_override_on_a_shipped_config_is_enough(path, override, read):
    assert read(load(path, [override]))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_fewer_responses_are_one_override_or_the_one_the_message_names(path):
    if kind(path) == "agentic":
        return
    try:
        config = load(path, ["n_resp_per_prompt=4"])
    except ConfigError as error:
        (problem,) = (d for d in error.diagnostics if d.is_error)
        assert problem.id == "C121"
        groups = problem.message.rpartition("use ")[2]
        sizes = [f"rollout_batch_size={groups}", f"algorithm.filter_groups.gen_batch_size={groups}"]
        config = load(path, ["n_resp_per_prompt=4", *sizes])
    assert config.samples_per_group == 4


def test_a_tight_staleness_threshold_of_the_fully_asynchronous_files():
    for name in ("fully_async_7b", "fully_async_cpu"):
        config = load(ROOT / f"configs/{name}.yaml", ["staleness_threshold=5"])
        assert config.async_training.staleness.soft_versions == 5


def test_options_written_for_the_new_choice_stay(files):
    base = files.text(
        files.tree_text({"tis_upper_bound": 2.0, "algorithm": {"pg_options": {"clip_low": 0.3}}}), "a.yaml"
    )
    files.text("defaults: [a]\npg_variant: tis\n", "b.yaml")
    assert load(str(files.folder / "b.yaml")).algorithm.pg_options.tis_upper_bound == 2.0
    with pytest.raises(ConfigError, match="C001.*tis_upper_bound"):
        load(base)
    config = load(str(files.folder / "b.yaml"), ["pg_variant=ppo", "pg_clip=0.1"])
    assert (config.algorithm.pg_options.clip_low, config.algorithm.pg_options.clip_high) == (0.1, 0.1)


def test_devices_in_another_form_replace_the_earlier_ones(files):
    files.rlvr()
    files.text("defaults: [run]\ntrainer: {nnodes: 2, n_gpus_per_node: 4}\nrollout: {n_gpus_per_node: 2}\n", "b.yaml")
    path = str(files.folder / "b.yaml")
    config = load(path, ["rollout_batch_size=16"])
    assert config.actor_train.device_mapping == (0, 1, 2, 3, 8, 9, 10, 11) and config.num_nodes == 3
    again = load(path, ["rollout_batch_size=16", "trainer.nnodes=1", "actor_infer.device_mapping=4-7"])
    assert (again.actor_train.num_ranks, again.actor_infer.device_mapping) == (4, (4, 5, 6, 7))


def test_a_reference_may_use_the_name_under_which_the_value_was_written(files):
    path = files.rlvr(
        {
            "n_resp_per_prompt": 4,
            "num_return_sequences_in_group": files.Remove,
            "rollout_batch_size": "${n_resp_per_prompt}",
        }
    )
    assert load(path).rollout_batch_size == 4


def test_two_names_with_the_same_value_agree_also_through_a_reference(files):
    same = {"vars": {"n": 0.1}, "clip_ratio_low": "${vars.n}", "algorithm": {"pg_options": {"clip_low": 0.1}}}
    assert load(files.rlvr(same)).algorithm.pg_options.clip_low == 0.1
    with pytest.raises(ConfigError, match="C016"):
        load(files.rlvr({**same, "vars": {"n": 0.2}}))


def test_a_section_that_comes_in_by_reference_is_renamed_too(files):
    path = files.rlvr({"vars": {"a": {"pg_clip": 0.1}}, "algorithm": "${vars.a}"})
    assert load(path).algorithm.pg_options.clip_high == 0.1


@pytest.mark.parametrize("place", ["", "algorithm.", "reward_model."])
@pytest.mark.parametrize(
    ("section", "written", "key", "value"),
    [
        ("overlong_buffer", {"enable": True, "len": 8, "penalty_factor": 0.5}, "len", 16),
        ("filter_groups", {"enable": True, "metric": "acc", "max_num_gen_batches": 7}, "max_num_gen_batches", 9),
        ("correction", {"weight_level": "sequence", "normalise": "batch"}, "normalise", "none"),
        ("pg_options", {"clip_low": 0.1, "clip_high": 0.3}, "clip_low", 0.15),
    ],
)
def test_one_key_of_a_section_under_another_name_leaves_the_others(files, section, written, key, value, place):
    if section != "overlong_buffer":
        place = place.replace("reward_model.", "algorithm.")  # verl's name of that section alone
    file = files.rlvr({f"algorithm.{section}": written})
    found = getattr(load(file, (f"{place}{section}.{key}={value}",)).algorithm, section)
    assert {k: getattr(found, k) for k in written} == {**written, key: value}

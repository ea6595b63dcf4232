"""The roles of a step, from the config and the started groups of ranks."""

from pathlib import Path

import pytest

pytest.importorskip("ray")

from roll_async.cluster.roles.trainer_group import BasePolicy
from roll_async.config.api import load
from roll_async.launch.run import learner_parts

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "rlvr_config_async_cpu.yaml"
REFERENCE = "reference={strategy_args: {strategy_name: megatron_infer}}"


class Group:
    """Started ranks."""


@pytest.mark.parametrize("rank", [0, 4])
def test_the_actor_without_its_adapters_is_the_reference_and_takes_its_turn_on_the_same_ranks(rank):
    config = load(CONFIG, [REFERENCE, f"actor_train.model_args.lora_rank={rank}"])
    actor, reference = Group(), Group()
    parts = learner_parts(config, {"actor_train": actor, "reference": reference, "critic": Group()})
    assert parts.actor is actor and parts.critic is None and not parts.teachers
    if rank:
        assert isinstance(parts.reference, BasePolicy)
        assert parts.sharing == (frozenset({"actor_train", "reference"}),)
    else:
        assert parts.reference is reference
        assert set(parts.sharing) == {frozenset({"actor_train"}), frozenset({"reference"})}


def test_teachers_with_folders_are_ranks_by_role_and_those_with_an_address_are_none():
    teachers = (
        "teachers={maths: {strategy_args: {strategy_name: megatron_infer}}, code: {address: http://a:1/v1, model: m}}"
    )
    config = load(CONFIG, [teachers, "algorithm.distill_coef=0.5"])
    training = {name: Group() for name in ("actor_train", "teachers.maths", "critic")}
    assert learner_parts(config, training).teachers == {"teachers.maths": training["teachers.maths"]}
    config = load(CONFIG, ["teacher={strategy_args: {strategy_name: megatron_infer}}", "algorithm.distill_coef=0.5"])
    training["teacher"] = training.pop("teachers.maths")
    assert learner_parts(config, training).teachers == {"teacher": training["teacher"]}

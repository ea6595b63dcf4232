"""Adapters alone: what a push sends, what proves it, and where they have to be merged instead."""

from dataclasses import replace

import pytest
import torch

from roll_async.checkpoint.hf_names.families import FAMILIES
from roll_async.config.api import load_with_warnings
from roll_async.weight_sync.adapters import PLAIN_LAYERS, AdapterShape, adapters_of, choose_adapters
from roll_async.weight_sync.bucket import Bucket, Content, UpdatePlan, adapter_half, is_adapter
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.digest import of_replica, of_trainer
from roll_async.weight_sync.layout import Cut, EngineLayout
from roll_async.weight_sync.push import ExportPlanner
from roll_async.weight_sync.transfer import TensorPart, open_receiver, open_sender

LAYER = "model.layers.0.self_attn.q_proj.weight"
A, B = (adapter_half(LAYER, half) for half in ("lora_A", "lora_B"))
CONFIG = """
exp_name: run
pretrain: Qwen/Qwen2.5-7B
prompt_length: 64
response_length: 64
rollout_batch_size: 8
rewards: {math_rule: {type: math_rule}}
actor_train:
  strategy_args: {strategy_name: megatron_train}
  data_args: {file_name: train.jsonl}
  model_args: {lora_rank: 8}
actor_infer: {strategy_args: {strategy_name: vllm}}
"""


def config(tmp_path, *overrides):
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    return load_with_warnings(path, overrides).config


def parts(version, *, frozen=True, rank=0, size=1):
    """What trainer rank `rank` holds: rows of W and B; A is sent by the first."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(8, 6, generator=generator)
    up, down = (torch.rand(shape, generator=generator.manual_seed(version)) for shape in ((8, 2), (2, 6)))

    def rows(name, tensor):
        step = 8 // size
        cut = Cut(dim=0, start=rank * step, stop=(rank + 1) * step) if size > 1 else None
        return TensorPart(name=name, shape=tuple(tensor.shape), cut=cut, tensor=tensor.split(step)[rank])

    found = [rows(LAYER, weight)] if frozen else []
    return [*found, rows(B, up), *([TensorPart.whole(A, down)] if rank == 0 else [])]


class Ends:
    """Two trainer ranks and one engine of two ranks, over shared memory."""

    def __init__(self):
        self.senders, self.kept = [None, None], [LastExport(), LastExport()]
        self.layout, self.held = EngineLayout(tensor=2, num_kv_heads=2), [{}, {}]

    def send(self, version, content, **fields):
        """(plan, all blocks), published anew."""
        plan = UpdatePlan(
            version=version, transport="shm", verify="full", layout=self.layout, content=content, **fields
        )
        frozen = content is not Content.ADAPTERS
        for rank in range(2):
            mine = parts(version, frozen=frozen, rank=rank, size=2)
            self.senders[rank] = open_sender(plan, mine, source=rank, block_bytes=1 << 20, previous=self.senders[rank])
        return plan, [block for sender in self.senders for block in iter(sender.next_block, None)]

    def take(self, plan, blocks):
        """Receivers that hold them, by rank."""
        receivers = [open_receiver(plan, kept, rank=rank) for rank, kept in enumerate(self.kept)]
        for receiver in receivers:
            receiver.take(Bucket(index=0, blocks=tuple(blocks)))
            assert not receiver.incomplete
        return receivers

    def push(self, version, content, *, serve=True):
        """(digest of the trainer, of the engine, bytes)."""
        plan, blocks = self.send(version, content)
        receivers = self.take(plan, blocks)
        for rank, receiver in enumerate(receivers):
            if serve:
                self.held[rank] |= {name: tensor.clone() for name, tensor in receiver.tensors()}
                receiver.committed()
        sent, held = of_trainer([s.sent for s in self.senders]), of_replica(r.digest for r in receivers)
        for receiver in receivers:
            receiver.close()
        return sent, held, sum(block.num_bytes for block in blocks)

    def close(self):
        for sender in self.senders:
            if sender is not None:
                sender.close()


@pytest.fixture
def ends():
    made = Ends()
    yield made
    made.close()


def test_adapters_alone_have_the_digest_of_the_whole_version(ends):
    sent, held, num_bytes = ends.push(1, Content.WHOLE)
    assert sent == held and num_bytes >= 4 * (48 + 16 + 12)
    alone = ends.push(2, Content.ADAPTERS)
    assert alone[0] == alone[1] != sent and alone[2] < 4 * 48
    assert alone[0] == Ends().push(2, Content.WHOLE)[0], "a whole push of the same version proves the same"
    whole = {part.name: part.tensor for part in parts(2)}
    for held_by_rank in ends.held:
        assert torch.equal(held_by_rank[A], whole[A]) and torch.equal(held_by_rank[B], whole[B])


def test_an_engine_with_other_frozen_weights_cannot_prove_an_adapter(ends):
    ends.push(1, Content.WHOLE)
    ends.kept[1].frozen._held = [ends.kept[1].frozen._held[0] + 1]
    sent, held, _ = ends.push(2, Content.ADAPTERS)
    assert sent != held and sent.split(".")[0] == held.split(".")[0]


@pytest.mark.parametrize("loss", ["never", "uncommitted", "merged", "asleep"])
def test_an_engine_without_frozen_weights_refuses_adapters_alone(ends, loss):
    if loss != "never":
        ends.push(1, Content.WHOLE)
    if loss == "uncommitted":
        ends.push(2, Content.WHOLE, serve=False)
    elif loss == "merged":
        ends.push(2, Content.MERGED)
    elif loss == "asleep":
        ends.kept[0].frozen.forget()
    else:
        sent = ends.senders  # the trainer has sent nothing either: it must not begin
        assert sent == [None, None]
        with pytest.raises(RuntimeError, match="the weights that they add to are not held"):
            ends.push(1, Content.ADAPTERS)
        return
    with pytest.raises(RuntimeError, match="the weights that they add to are not held"):
        ends.push(3, Content.ADAPTERS)


def test_halves_that_were_proved_stay_what_they_are_while_another_replica_is_given_everything(ends):
    ends.push(1, Content.WHOLE)
    receivers = ends.take(*ends.send(2, Content.ADAPTERS))
    digest = of_replica(r.digest for r in receivers)
    assert digest == of_trainer([s.sent for s in ends.senders])
    ends.send(2, Content.WHOLE, others_proved=True)
    whole = {part.name: part.tensor for part in parts(2)}
    for receiver in receivers:
        found = dict(receiver.tensors())
        assert torch.equal(found[A], whole[A]) and torch.equal(found[B], whole[B])
        receiver.close()


def test_a_trainer_whose_whole_export_was_broken_off_still_knows_what_it_sent_before(ends):
    ends.push(1, Content.WHOLE)
    plan = UpdatePlan(version=2, transport="shm", verify="full", layout=ends.layout, content=Content.WHOLE)
    for rank in range(2):
        ends.senders[rank] = open_sender(
            plan, parts(2, rank=rank, size=2), source=rank, block_bytes=16, previous=ends.senders[rank]
        )
        ends.senders[rank].next_block()
    sent, held, _ = ends.push(3, Content.ADAPTERS)
    assert sent == held


def planned(planner, version, receivers, *, failed=()):
    """What the export sends; the receivers that did not fail prove and serve it."""
    content = planner.next(version, receivers).content
    good = [r for r in receivers if r not in failed]
    planner.transferred(receivers, good)
    planner.committed(good, good)
    return content


def planner_of(**options):
    common = UpdatePlan(version=0, transport="shm", verify="full")
    return ExportPlanner(common, **{"sparse": False, "adapters": True, **options})


def test_frozen_weights_travel_once_and_again_when_a_replica_comes_or_fails():
    planner = planner_of()
    assert planned(planner, 1, ["a", "b"]) is Content.WHOLE
    assert planned(planner, 2, ["a", "b"]) is Content.ADAPTERS
    assert planned(planner, 3, ["a", "b"], failed=["b"]) is Content.ADAPTERS
    assert planned(planner, 3, ["b"]) is Content.WHOLE, "b holds nobody knows what"
    assert planned(planner, 4, ["a", "b"]) is Content.ADAPTERS, "a was never without"
    assert planned(planner, 5, ["c"]) is Content.WHOLE
    assert planned(planner, 6, ["a", "b", "c"]) is Content.ADAPTERS
    assert planned(planner, 7, ["a", "new b"]) is Content.WHOLE


def test_a_replica_that_fails_at_the_swap_gets_everything():
    planner = planner_of()
    assert planned(planner, 1, ["a", "b"]) is Content.WHOLE
    planner.next(2, ["a", "b"])
    planner.transferred(["a", "b"], ["a", "b"])
    planner.committed(["a", "b"], ["a"])
    assert planned(planner, 2, ["b"]) is Content.WHOLE


def test_without_adapters_everything_is_merged():
    planner = planner_of(adapters=False)
    assert [planned(planner, v, ["a"]) for v in (1, 2)] == [Content.MERGED] * 2


def test_halves_are_known_by_their_names():
    assert A == "model.layers.0.self_attn.q_proj.lora_A.weight" and is_adapter(A) and is_adapter(B)
    assert not is_adapter(LAYER) and not is_adapter("model.lora_A.norm.weight")


def test_on_cpu_adapters_travel_alone_where_engine_and_model_allow_it(tmp_path):
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert adapters_of(config(tmp_path)) == AdapterShape(rank=8, layers=every)
    some = config(
        tmp_path,
        "actor_train.model_args.lora_target=[down_proj]",
        "actor_infer={strategy_args: {strategy_name: hf_infer}}",
    )
    assert adapters_of(some) == AdapterShape(rank=8, layers=("down_proj",))
    assert adapters_of(config(tmp_path, "weight_sync.adapters=merged")) is None


HINDRANCES = [
    (("actor_train.model_args.lora_rank=0",), "lora_rank is 0"),
    (("weight_sync.sparse=on",), "sparse: on sends what changed"),
    (("actor_infer={strategy_args: {strategy_name: sglang}}",), "SGLang"),
    (("actor_train.model_args.lora_rank=1000",), "at most 512"),
    (("pretrain=Qwen/Qwen3-30B-A3B",), "Qwen3MoeForCausalLM has experts"),
    (
        ("actor_infer.device_mapping=[0]", "actor_infer.strategy_args.strategy_config={quantization: fp8}"),
        "quantization fp8",
    ),
    (
        ("actor_infer.device_mapping=[0,1]", "actor_infer.strategy_args.strategy_config={pipeline_parallel_size: 2}"),
        "several pipeline stages",
    ),
]


@pytest.mark.parametrize(("overrides", "reason"), HINDRANCES, ids=lambda value: value if isinstance(value, str) else "")
def test_where_they_cannot_they_are_merged_and_asking_for_them_alone_is_refused(tmp_path, overrides, reason):
    shape, why = choose_adapters(config(tmp_path, *overrides))
    assert shape is None and reason in why
    wanted = config(tmp_path, *overrides)
    wanted = replace(wanted, weight_sync=replace(wanted.weight_sync, adapters="alone"))
    with pytest.raises(ValueError, match=rf"weight_sync.adapters=alone: .*{reason}.*; use auto"):
        choose_adapters(wanted)


def test_on_gpus_they_are_alone_only_when_asked_for(tmp_path):
    devices = ("actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1]")
    shape, why = choose_adapters(config(tmp_path, *devices))
    assert shape is None and "on GPUs" in why
    assert adapters_of(config(tmp_path, *devices, "weight_sync.adapters=alone")) is not None


def test_models_whose_adapters_go_alone_have_tables_that_name_each_projection():
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    plain = set()
    for family in FAMILIES:
        linear = {name.split(".")[-2] for row in family.rows if ".linear_" in row.megatron for name in row.hf}
        if linear == every and not any(row.is_expert for row in family.rows):
            plain |= set(family.architectures)
    assert set(PLAIN_LAYERS) <= plain

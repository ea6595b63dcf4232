"""A push of what changed leaves a replica with the same bits as a full one, and proves it by the same digest."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roll_async.weight_sync.bucket import STAGED, TensorSlot, UpdatePlan
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.digest import Digest, flat_bytes
from roll_async.weight_sync.layout import Cut, EngineLayout
from roll_async.weight_sync.transfer import TensorPart
from roll_async.weight_sync.transport.transports import sends_changes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
NAME = "model.layers.0.mlp.up_proj.weight"
LARGE = 20_000


def plan_of(export, base=None):
    return UpdatePlan(version=export, transport="shm", verify="full", export=export, base=base)


def slot_of(tensor, name="w"):
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    return TensorSlot(name=name, dtype=dtype, shape=shape, offset=0, num_bytes=tensor.numel() * tensor.element_size())


def bits(seed, shape, dtype):
    """Arbitrary bits, numbers or not."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def changed(tensor, places, seed=1):
    """The tensor with other bits at `places`."""
    new = tensor.clone()
    size = tensor.element_size()
    raw = new.view(-1).view(torch.uint8).view(-1, size)
    for place in places:
        raw[place, seed % size] ^= 1 + seed % 255
    return new


def step(tensor, share=0.02, seed=1):
    """The tensor with that share of its values changed."""
    count = tensor.numel()
    return changed(tensor, random.Random(seed).sample(range(count), int(share * count)), seed)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([1, 2, 255, 256, 257, 600, 5000]),
    seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=4),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]),
)
@example(dtype=torch.bfloat16, size=600, seeds=[3], share=0.004)
def test_changes_applied_one_version_after_the_other_give_the_bits_of_the_trainer(dtype, size, seeds, share):
    trainer, engine, tensor = LastExport(), LastExport(), bits(0, (size,), dtype)
    for export, seed in enumerate([0, *seeds], start=1):
        base = export - 1 or None
        assert trainer.begin(plan_of(export, base)) is engine.begin(plan_of(export, base)) is (export > 1)
        tensor = step(tensor, share, seed)
        slot, changes = slot_of(tensor), trainer.changes(slot_of(tensor), tensor)
        if changes is not None:
            assert export > 1 and 0 < len(changes) <= slot.num_bytes / 2 + tensor.element_size() + 1
            count = len(changes) // (tensor.element_size() + 1)
            slot = TensorSlot(name="w", dtype=slot.dtype, shape=slot.shape, offset=0, num_bytes=0, num_values=count)
        whole = engine.whole(slot, flat_bytes(tensor) if changes is None else changes, owned=False)
        assert torch.equal(whole, flat_bytes(tensor)) and torch.equal(trainer[slot], flat_bytes(tensor))
        digest = Digest("full", "gloo")
        digests = [digest.of(slot, data) for data in (whole, flat_bytes(tensor))]
        assert digests[0] == digests[1] == digest.of(slot_of(tensor), flat_bytes(tensor))
        trainer.complete(plan_of(export))
        engine.complete(plan_of(export))


def test_the_example_of_the_module():
    kept, tensor = LastExport(), torch.zeros(600, dtype=torch.bfloat16)
    kept.begin(plan_of(1))
    assert kept.changes(slot_of(tensor), tensor) is None
    kept.complete(plan_of(1))
    assert kept.begin(plan_of(2, 1))
    tensor[3], tensor[500] = 1.0, 2.0
    changes = kept.changes(slot_of(tensor), tensor)
    assert changes[:6].view(torch.bfloat16).tolist() == [1.0, 0.0, 2.0] and changes[6:].tolist() == [3, 255, 240]


@pytest.mark.parametrize(("share", "sparse"), [(0.02, True), (0.3, True), (0.4, False), (0.9, False)])
def test_a_tensor_of_which_much_changed_travels_whole(share, sparse):
    kept, tensor = LastExport(), bits(0, (LARGE,), torch.bfloat16)
    kept.begin(plan_of(1))
    kept.changes(slot_of(tensor), tensor)
    kept.complete(plan_of(1))
    kept.begin(plan_of(2, 1))
    changes = kept.changes(slot_of(tensor), new := step(tensor, share))
    assert (changes is not None) == sparse
    assert torch.equal(kept[slot_of(tensor)], flat_bytes(new)), "the next one is compared with this one either way"


def weights(seed=0):
    """One large tensor of each kind, beside small and odd ones."""
    large = {f"large.{dtype}": bits(seed, (100, 200), dtype) for dtype in DTYPES[:3]}
    return large | {"empty": torch.empty(0, 4), "scalar": torch.tensor(1.5), "frozen": torch.ones(50, 50)}


def stepped(tensors, seed=1):
    return {name: t if name in ("empty", "frozen") else step(t, 0.02, seed) for name, t in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("transport", sorted(STAGED))
@pytest.mark.parametrize("block_bytes", [1000, 30_000, 1 << 20])
def test_over_every_transport_a_push_of_changes_equals_a_full_one_and_is_shorter(transfers, transport, block_bytes):
    tensors, kept, sender, lengths = weights(), LastExport(), None, []
    options = {"transport": transport, "block_bytes": block_bytes}
    for export in range(1, 5):
        tensors = stepped(tensors, export)
        numbers = {"version": export, "export": export, "base": export - 1 or None}
        sender = transfers.sender(tensors, previous=sender, **numbers, **options)
        receiver = transfers.receiver(sender.plan, kept=kept)
        sizes = []
        (got,), digests = transfers.send_all([sender], [receiver], lambda bucket, n=sizes: n.append(bucket.num_bytes))
        fresh = transfers.sender(tensors, **options)
        (full,), in_full = transfers.send_all([fresh], [transfers.receiver(fresh.plan)])
        assert set(digests) == set(in_full) and len(set(digests)) == 1
        assert got.keys() == full.keys() == tensors.keys()
        assert all(torch.equal(flat_bytes(got[name]), flat_bytes(full[name])) for name in tensors)
        receiver.committed()
        receiver.close()
        lengths.append(sum(sizes))
    assert max(lengths[1:]) < lengths[0] / 10 or block_bytes == 1000


def test_engine_ranks_apply_what_changed_in_their_own_parts(transfers):
    truth, layout = bits(0, (64, 400), torch.bfloat16), EngineLayout(tensor=2)
    cuts = [Cut(dim=0, start=0, stop=32), Cut(dim=0, start=32, stop=64)]
    kept, senders = [LastExport(), LastExport()], [None, None]
    for export in range(1, 4):
        truth = step(truth, 0.02, export)
        parts = [TensorPart(name=NAME, shape=(64, 400), cut=c, tensor=truth[c.start : c.stop]) for c in cuts]
        numbers = {"version": export, "export": export, "base": export - 1 or None, "layout": layout}
        senders = [
            transfers.sender([part], "gloo", block_bytes=1 << 20, previous=senders[i], source=i, **numbers)
            for i, part in enumerate(parts)
        ]
        receivers = [transfers.receiver(senders[0].plan, rank, kept[rank]) for rank in range(2)]
        got, (trainer, replica) = transfers.send_all(senders, receivers)
        assert trainer == replica
        for rank, tensors in enumerate(got):
            rows = slice(32 * rank, 32 * rank + 32)
            assert torch.equal(flat_bytes(tensors[NAME][rows]), flat_bytes(truth[rows]))
            receivers[rank].committed()
            receivers[rank].close()


def begun(transfers, tensors, transport="shm"):
    """(sender, what an engine holds) after a full push that was committed."""
    sender, kept = transfers.sender(tensors, transport, block_bytes=1 << 20, export=1), LastExport()
    receiver = transfers.receiver(sender.plan, kept=kept)
    transfers.send_all([sender], [receiver])
    receiver.committed()
    receiver.close()
    return sender, kept


@pytest.mark.parametrize("place", [0, -1])
def test_a_byte_damaged_among_the_changes_is_refused(transfers, place):
    """The first byte is of a value, the last says where one lies."""
    tensors = {"w": bits(0, (LARGE,), torch.bfloat16)}
    sender, kept = begun(transfers, tensors)

    def flip(bucket):
        (block,) = bucket.blocks
        with open(block.location, "r+b") as file:
            data = bytearray(file.read(block.num_bytes))
            data[place] ^= 1
            file.seek(0)
            file.write(data)

    after = transfers.sender(stepped(tensors), previous=sender, block_bytes=1 << 20, export=2, base=1)
    receiver = transfers.receiver(after.plan, kept=kept)
    try:
        _, (trainer, replica) = transfers.send_all([after], [receiver], damage=flip)
    except RuntimeError as error:
        assert "a changed value lies at" in str(error)
    else:
        assert trainer != replica


def test_a_change_beyond_the_end_of_its_tensor_is_refused():
    kept, tensor = LastExport(), torch.zeros(40)
    kept.begin(plan_of(1))
    kept.whole(slot_of(tensor, "norm"), flat_bytes(tensor), owned=False)
    kept.complete(plan_of(1))
    kept.begin(plan_of(2, 1))
    slot = TensorSlot(name="norm", dtype="float32", shape=(40,), offset=0, num_bytes=5, num_values=1)
    with pytest.raises(RuntimeError, match="norm: a changed value lies at 40 of 40"):
        kept.whole(slot, torch.tensor([0, 0, 0, 0, 40], dtype=torch.uint8), owned=False)


def test_an_engine_that_lacks_the_export_before_refuses_what_changed_since(transfers):
    tensors = weights()
    sender, kept = begun(transfers, tensors)
    after = transfers.sender(stepped(tensors), previous=sender, export=2, base=1)
    with pytest.raises(RuntimeError, match="export 2 holds what changed since export 1, which is not held"):
        transfers.receiver(after.plan, kept=LastExport())
    left = transfers.receiver(after.plan, kept=kept)  # begins, and does not come to its commit
    left.close()
    with pytest.raises(RuntimeError, match="is not held"):
        transfers.receiver(after.plan, kept=kept)


@pytest.mark.parametrize("sent", [0, 1])
def test_a_trainer_rank_that_did_not_send_the_export_before_to_its_end_sends_everything(transfers, sent):
    tensors = weights()
    sender = transfers.sender(tensors, block_bytes=1 << 20, export=1)
    for _ in range(sent):
        assert sender.next_block() is not None
    after = transfers.sender(stepped(tensors), previous=sender, block_bytes=1 << 20, export=2, base=1)
    assert all(slot.num_values is None for slot in after.next_block().slots)


def test_nothing_is_kept_of_an_export_on_which_none_builds(transfers):
    sender = transfers.sender(weights())
    receiver = transfers.receiver(sender.plan, kept=(kept := LastExport()))
    transfers.send_all([sender], [receiver])
    assert not kept._pieces and not sender.kept._pieces


def test_what_an_engine_keeps_does_not_change_with_the_files_it_came_in(transfers):
    tensors = weights()
    sender, kept = begun(transfers, tensors)
    transfers.send_all([transfers.sender(stepped(tensors), previous=sender)], [])
    frozen = slot_of(tensors["frozen"], "frozen")
    large = slot_of(tensors["large.torch.float32"], "large.torch.float32")
    assert torch.equal(kept[frozen], flat_bytes(tensors["frozen"]))
    assert torch.equal(kept[large], flat_bytes(tensors["large.torch.float32"]))


@pytest.mark.parametrize("transport", ["shm", "filesystem"])
def test_what_was_proved_stays_what_it_is_while_another_replica_is_given_everything(transfers, transport):
    """Large pieces, of which changes came, lie in memory of the engine; the norm came whole and is mapped."""
    tensors = weights() | {"norm": bits(5, (300,), torch.bfloat16)}
    sender, kept = begun(transfers, tensors, transport)
    tensors = stepped(tensors) | {"norm": bits(6, (300,), torch.bfloat16)}
    options = {"transport": transport, "block_bytes": 1 << 20}
    changes = transfers.sender(tensors, previous=sender, export=2, base=1, **options)
    receiver = transfers.receiver(changes.plan, kept=kept)
    (bucket,) = transfers.buckets([changes])
    receiver.take(bucket)
    everything = transfers.sender(tensors, previous=changes, export=3, others_proved=True, **options)
    transfers.send_all([everything], [])
    found, mapped = dict(receiver.tensors()), Path(bucket.blocks[0].location)
    assert all(torch.equal(flat_bytes(found[name]), flat_bytes(tensor)) for name, tensor in tensors.items())
    assert mapped.exists(), "on another host a mapping ends with its file"
    transfers.sender(tensors, previous=everything, export=4, base=3, **options)
    assert not mapped.exists()


def test_auto_sends_changes_where_bytes_cross_a_network():
    assert [t for t in ("shm", "gloo", "filesystem", "nccl", "cuda_ipc") if sends_changes("auto", t)] == [
        "gloo",
        "filesystem",
    ]
    assert sends_changes("on", "shm") and not sends_changes("off", "gloo")

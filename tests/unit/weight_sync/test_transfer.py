"""Tensors to buckets and back, byte for byte; and the digest that proves it."""

import pytest
import torch

from roll_async.weight_sync.bucket import Block, TensorSlot
from roll_async.weight_sync.digest import Digest, flat_bytes
from roll_async.weight_sync.layout import EngineLayout
from roll_async.weight_sync.transfer import TensorPart, pack, plan_blocks, size_of, unpack

TENSORS = {
    "embedding": torch.arange(35, dtype=torch.float32).view(7, 5),
    "half": torch.arange(3, dtype=torch.float16) / 3,
    "scalar": torch.tensor(2.5),
    "strided": torch.arange(12, dtype=torch.bfloat16).view(3, 4).T,
    "large": torch.arange(500, dtype=torch.float32),
    "last": torch.ones(1, 1, 3),
}


def blocks_of(tensors, block_bytes):
    parts = (TensorPart.whole(name, tensor) for name, tensor in tensors.items())
    return list(plan_blocks(parts, EngineLayout(), block_bytes))


def slot_of(name, tensor):
    size = tensor.numel() * tensor.element_size()
    return TensorSlot(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        offset=0,
        num_bytes=size,
    )


def digest_of(tensors, verify="full", transport="shm"):
    digest = Digest(verify, transport)
    for name, tensor in tensors.items():
        digest.add(digest.of(slot_of(name, tensor), flat_bytes(tensor)))
    return digest.hexdigest()


@pytest.mark.parametrize("block_bytes", [1, 64, 200, 4096])
def test_every_tensor_comes_back_as_it_was_whatever_the_size_of_a_block(block_bytes):
    found = {name: torch.full_like(tensor, 7) for name, tensor in TENSORS.items()}
    for planned in blocks_of(TENSORS, block_bytes):
        data = torch.full((size_of(planned),), 255, dtype=torch.uint8)
        pack(planned, data)
        block = Block(source=0, slots=tuple(slot for slot, _ in planned), num_bytes=len(data), location="")
        for slot, raw in unpack(block, data):
            assert len(raw) == slot.num_bytes
            tensor = raw.view(getattr(torch, slot.dtype)).view(slot.part_shape)
            target = found[slot.name]
            if slot.cut is not None:
                target = target.narrow(slot.cut.dim, slot.cut.start, slot.cut.stop - slot.cut.start)
            assert tensor.dtype == target.dtype
            target.copy_(tensor)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("block_bytes", [1, 64, 200, 4096])
def test_blocks_keep_to_their_size_unless_one_row_is_larger(block_bytes):
    for planned in blocks_of(TENSORS, block_bytes):
        ((slot, _),) = planned if len(planned) == 1 else ((None, None),)
        single_row = slot is not None and (not slot.part_shape or slot.part_shape[0] == 1)
        assert single_row or size_of(planned) <= block_bytes


def test_tensors_do_not_overlap_and_are_aligned_for_every_type():
    for planned in blocks_of(TENSORS, 1 << 20):
        end = 0
        for slot, _ in planned:
            assert slot.offset % 16 == 0 and slot.offset >= end
            end = slot.offset + slot.num_bytes


def test_planning_asks_for_no_more_tensors_than_one_block_holds():
    asked = []

    def stream():
        for name, tensor in TENSORS.items():
            asked.append(name)
            yield TensorPart.whole(name, tensor)

    first = next(plan_blocks(stream(), EngineLayout(), 200))
    assert [slot.name for slot, _ in first] == ["embedding", "half", "scalar", "strided"]
    assert asked == ["embedding", "half", "scalar", "strided", "large"]


@pytest.mark.parametrize("transport", ["shm", "nccl"])
@pytest.mark.parametrize("position", [0, 1023, 1024, 1999])
def test_one_changed_byte_changes_the_full_digest(position, transport):
    changed = {name: t.clone() for name, t in TENSORS.items()}
    changed["large"].view(torch.uint8)[position] ^= 1
    assert digest_of(changed, transport=transport) != digest_of(TENSORS, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_the_full_digest_sees_a_swap_of_equal_shapes_a_new_shape_a_new_type_and_a_missing_tensor(transport):
    def full(tensors):
        return digest_of(tensors, transport=transport)

    one, two = torch.zeros(4), torch.ones(4)
    base = full({"a": one, "b": two})
    assert base == full({"a": one.clone(), "b": two.clone()})
    different = [
        {"a": two, "b": one},
        {"a": one.view(2, 2), "b": two},
        {"a": one.view(torch.int32), "b": two},
        {"a": one},
    ]
    assert base not in [full(tensors) for tensors in different]
    assert len({full(tensors) for tensors in different}) == len(different)


@pytest.mark.parametrize("size", [10, 16 * 1024, 16 * 1024 + 4, 1 << 20])
def test_the_sampled_digest_sees_the_ends_and_a_stale_tensor_of_any_size(size):
    tensor = torch.zeros(size, dtype=torch.uint8)
    base = digest_of({"a": tensor}, "sample")
    for change in (0, size - 1, slice(None)):
        changed = tensor.clone()
        changed[change] = 1
        assert digest_of({"a": changed}, "sample") != base


def test_the_sampled_digest_reads_only_part_of_a_large_tensor():
    tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    changed = tensor.clone()
    changed[5000] = 1  # between the first window and the second
    assert digest_of({"a": changed}, "sample") == digest_of({"a": tensor}, "sample")
    assert digest_of({"a": changed}, "full") != digest_of({"a": tensor}, "full")


def test_without_verification_names_types_and_shapes_still_count():
    assert digest_of({"a": torch.zeros(4)}, "none") == digest_of({"a": torch.ones(4)}, "none")
    assert digest_of({"a": torch.zeros(4)}, "none") != digest_of({"b": torch.zeros(4)}, "none")
    assert digest_of({"a": torch.zeros(4)}, "none") != digest_of({"a": torch.zeros(2, 2)}, "none")


def test_an_unknown_level_is_refused_with_its_key_and_the_choices():
    with pytest.raises(ValueError, match="weight_sync.verify 'half'.*full | sample | none"):
        Digest("half", "shm")

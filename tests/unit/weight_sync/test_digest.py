"""The digest says what bytes there are, and nothing of where they lie."""

import pytest

torch = pytest.importorskip("torch")

from roll_async.weight_sync import digest as digests
from roll_async.weight_sync.bucket import TensorSlot
from roll_async.weight_sync.digest import Digest

SLOT = TensorSlot(name="w", dtype="uint8", shape=(40,), offset=0, num_bytes=40)


@pytest.mark.parametrize("transport", ["shm", "nccl"])
@pytest.mark.parametrize("base", [0, 4])
@pytest.mark.parametrize("offset", [0, 4, 8])
def test_bytes_at_any_address_have_the_same_digest(base, offset, transport):
    """A file that is mapped, or a part of a larger tensor, begins where it likes."""
    memory = torch.frombuffer(bytearray(64), dtype=torch.uint8, offset=base)
    piece = memory[offset : offset + 40]
    piece.copy_(torch.arange(40))
    digest = Digest("full", transport)
    assert digest.of(SLOT, piece) == digest.of(SLOT, torch.arange(40, dtype=torch.uint8))


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_bytes_that_stay_on_a_device_are_not_fetched_for_a_full_digest(transport, monkeypatch):
    piece, fetched = torch.arange(4096, dtype=torch.int64).view(torch.uint8), []
    slot = TensorSlot(name="w", dtype="int64", shape=(4096,), offset=0, num_bytes=len(piece))
    fetch = digests.bytes_of
    monkeypatch.setattr(digests, "bytes_of", lambda data: fetched.append(data.numel()) or fetch(data))
    Digest("full", transport).of(slot, piece)
    assert sum(fetched) <= 8, "the sum of each MiB alone"
    Digest("full", "shm").of(slot, piece)
    assert max(fetched) == len(piece)


def test_the_windows_of_a_block_leave_a_device_in_one_transfer_and_make_the_same_digests(monkeypatch):
    sizes = (0, 40, 1024, 40_000, 1_000_000)
    pieces = [
        (TensorSlot(name=f"w{n}", dtype="uint8", shape=(n,), offset=0, num_bytes=n), torch.arange(n).to(torch.uint8))
        for n in sizes
    ]
    one_by_one = [Digest("sample", "shm").of(slot, data) for slot, data in pieces]
    fetch, fetched = digests.bytes_of, []
    monkeypatch.setattr(digests, "bytes_of", lambda data: fetched.append(data.numel()) or fetch(data))
    assert Digest("sample", "cuda_ipc").of_block(pieces) == one_by_one
    assert fetched == [sum(min(n, 16 * 1024) for n in sizes)], "one transfer, of what is read alone"
    assert Digest("sample", "cuda_ipc").of_block([]) == [] and len(fetched) == 1

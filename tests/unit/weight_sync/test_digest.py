"""The digest says what bytes there are, and nothing of where they lie."""

import pytest

torch = pytest.importorskip("torch")

from roll_async.weight_sync.bucket import TensorSlot
from roll_async.weight_sync.digest import Digest

SLOT = TensorSlot(name="w", dtype="uint8", shape=(40,), offset=0, num_bytes=40)


@pytest.mark.parametrize("base", [0, 4])
@pytest.mark.parametrize("offset", [0, 4, 8])
def test_bytes_at_any_address_have_the_same_digest(base, offset):
    """A file that is mapped, or a part of a larger tensor, begins where it likes."""
    memory = torch.frombuffer(bytearray(64), dtype=torch.uint8, offset=base)
    piece = memory[offset : offset + 40]
    piece.copy_(torch.arange(40))
    assert Digest("full").of(SLOT, piece) == Digest("full").of(SLOT, torch.arange(40, dtype=torch.uint8))

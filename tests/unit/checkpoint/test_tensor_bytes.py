"""Bytes of tensors."""

import gc

import pytest
import torch

from roll_async.checkpoint.folders.tensor_bytes import bytes_of
from roll_async.checkpoint.folders.torch_files import disk_errors


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_the_bytes_are_those_of_the_storage_and_outlive_the_tensor(dtype):
    tensor = torch.arange(24).to(dtype).view(2, 3, 4)
    expected = bytes(tensor.flatten().view(torch.uint8).tolist())
    view = bytes_of(tensor)
    del tensor
    gc.collect()
    torch.zeros(1000)
    assert bytes(view) == expected and len(bytes_of(torch.empty(0, dtype=dtype))) == 0


def test_a_contiguous_tensor_is_not_copied_and_a_strided_one_reads_in_order():
    tensor = torch.zeros(8, dtype=torch.uint8)
    view = bytes_of(tensor)
    tensor[3] = 7
    assert view[3] == 7
    assert bytes(bytes_of(torch.arange(6, dtype=torch.uint8).view(2, 3).T)) == bytes([0, 3, 1, 4, 2, 5])


def test_a_save_that_the_disk_does_not_take_says_so(tmp_path):
    """The error of torch's zip writer is about positions in the file."""
    with (
        pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"),
        disk_errors(tmp_path),
        open("/dev/full", "wb") as file,
    ):
        torch.save(torch.zeros(100_000), file)

import torch

from roll_async.inference.storages import Storages


def test_memory_is_given_back_and_views_of_it_are_valid_again():
    whole = torch.arange(12.0)
    part, same = whole[3:6], whole.view(3, 4)
    storages = Storages([whole, part, same])
    assert storages.num_bytes == 48, "each piece of memory counts once"
    storages.release(keep_content=False)
    assert storages.num_bytes == 0 and whole.untyped_storage().nbytes() == 0
    storages.restore(zero=True)
    assert storages.num_bytes == 48
    part.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert whole.tolist() == [0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0] and same[1, 0] == 2


def test_host_memory_that_is_to_be_kept_stays_where_it_is():
    tensor = torch.arange(4.0)
    storages = Storages([tensor])
    storages.release(keep_content=True)
    assert storages.num_bytes == 16 and storages.host_bytes == 0
    storages.restore()
    assert tensor.tolist() == [0, 1, 2, 3]

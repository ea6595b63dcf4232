"""Whose fault an error of a replica is."""

import pytest

from roll_async.weight_sync.errors import EngineDead, UpdateFailed, update_errors


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("tensors are missing"), "commit: tensors are missing"),
        (ConnectionResetError("the trainer hung up"), "commit: ConnectionResetError: the trainer hung up"),
        (KeyError("norm"), "commit: KeyError: 'norm'"),
    ],
)
def test_what_loaders_and_transports_raise_is_a_failed_update_of_a_live_replica(error, text):
    with pytest.raises(UpdateFailed) as raised, update_errors("commit"):
        raise error
    assert str(raised.value) == text and raised.value.__cause__ is error


@pytest.mark.parametrize("error", [EngineDead("gone"), UpdateFailed("said already"), AssertionError("ours")])
def test_a_death_and_a_fault_of_ours_stay_what_they_are(error):
    with pytest.raises(type(error)) as raised, update_errors("commit"):
        raise error
    assert raised.value is error

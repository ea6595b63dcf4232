"""Random states and recomputation."""

from contextlib import nullcontext


class CudaRNGStatesTracker:
    def __init__(self):
        self.reset()

    def reset(self):
        self.states_, self.seeds_ = {}, set()

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states

    def add(self, name, seed): ...


def activation_recompute_forward(*args, **kwargs):
    return nullcontext()


def checkpoint(function, *args, distribute_saved_activations, get_rng_state_tracker, tp_group, **kwargs):
    """Recomputes in the backward pass. The layers of the tests draw nothing at random."""
    import torch

    assert not distribute_saved_activations
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def get_all_rng_states():
    return {}


def is_fp8_activation_recompute_enabled():
    return False

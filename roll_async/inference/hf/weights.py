"""Where the tensors of a checkpoint lie in a Transformers model: most are parameters of their own, experts are slices
of one parameter that holds all of a layer. Shape letters: E experts, I inner size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")
_WITH_TOWER = {"model.language_model.": "model.", "model.visual.": "visual."}
"""Where a model with a vision tower has its halves, and how checkpoints name them."""


class WeightTargets:
    """Tensors of the live model by their names in checkpoints. Copying into one changes the model."""

    def __init__(self, model: nn.Module, model_type: str) -> None:
        """`model_type`: of config.json."""
        self._mixtral = model_type in ("mixtral", "minimax_m2")
        # Buffers that are not saved, such as rotary tables, come in no push.
        persistent = model.state_dict().keys()
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]
        self._targets: dict[str, Tensor] = {}
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *buffers]:
            self._targets |= self._parts(saved_name(name), tensor.detach())  # autograd refuses a copy into a leaf
        own = {name for name, _ in [*model.named_parameters(), *buffers]}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - own
        self.names = frozenset(self._targets) - {*map(saved_name, tied)}
        """Names that an update must contain: a tied output layer is updated with the embedding."""

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors beside the model's own, which an update must contain, too."""
        self._targets |= tensors
        self.names |= tensors.keys()

    def __getitem__(self, name: str) -> Tensor:
        """Raises RuntimeError for a name the model does not have."""
        if name not in self._targets:
            raise RuntimeError(f"the model has no parameter {name}")
        return self._targets[name]

    def _parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The checkpoint's names of one parameter, and its part of each."""
        layer, _, last = name.rpartition(".")
        if self._mixtral:
            layer = layer.replace(".mlp", ".block_sparse_moe")
        gate, up, down = _MIXTRAL if self._mixtral else _EXPERTS
        if not layer.endswith(".experts"):
            return {f"{layer}.{last}" if layer else last: tensor}
        if last == "gate_up_proj":  # [E,2I,H]
            halves = [(e, *half.chunk(2)) for e, half in enumerate(tensor)]
            gates = {f"{layer}.{e}.{gate}.weight": part for e, part, _ in halves}
            return gates | {f"{layer}.{e}.{up}.weight": part for e, _, part in halves}
        assert last == "down_proj", f"unknown parameter of experts {name}"  # [E,H,I]
        return {f"{layer}.{e}.{down}.weight": part for e, part in enumerate(tensor)}


def saved_name(name: str) -> str:
    """A parameter's name in checkpoints, before experts are parted."""
    live = next((prefix for prefix in _WITH_TOWER if name.startswith(prefix)), "")
    return _WITH_TOWER.get(live, "") + name.removeprefix(live)

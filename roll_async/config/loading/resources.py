"""`trainer` and `rollout`: nnodes nodes with n_gpus_per_node devices of each, as a device mapping."""

from dataclasses import fields

from roll_async.config.loading.devices import MAX_DEVICES, parse_devices
from roll_async.config.schema import PipelineConfig
from roll_async.config.yaml.diagnostics import Diagnostic, shown
from roll_async.config.yaml.node import Node, diagnostic, drop, find, plain, put, type_name

_GPUS_PER_NODE: int = next(f.default for f in fields(PipelineConfig) if f.name == "num_gpus_per_node")  # type: ignore[assignment]
BLOCKS = {"trainer": "actor_train", "rollout": "actor_infer"}
"""Block to the role whose devices it gives."""
BLOCK_KEYS = frozenset({"nnodes", "n_gpus_per_node", "device"})


class ResourceBlocks:
    """Turns the blocks of a merged tree into devices: trainer nodes first, rollout nodes after them."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self.errors: list[Diagnostic] = []
        self.warnings: list[Diagnostic] = []

    def run(self) -> None:
        """Both blocks."""
        per_node = self._gpus_per_node()
        first = 0
        for block, role in BLOCKS.items():
            first = self._devices(block, role, first, per_node)

    def _gpus_per_node(self) -> int:
        """num_gpus_per_node; where it is not written, nodes are as large as the largest that a block asks for."""
        written = find(self.root, ("num_gpus_per_node",))
        if written is not None:
            value = written.value
            return value if isinstance(value, int) and value > 0 else _GPUS_PER_NODE  # reported as C003 or C005 later
        wanted = [find(self.root, (block, "n_gpus_per_node")) for block in ("trainer", "rollout")]
        sizes = [(node.value, node) for node in wanted if node is not None and isinstance(node.value, int)]
        size, largest = max(sizes, key=lambda pair: pair[0], default=(0, self.root))
        if not _GPUS_PER_NODE < size <= MAX_DEVICES:
            return _GPUS_PER_NODE
        self.root = put(self.root, ("num_gpus_per_node",), largest)
        return size

    def _devices(self, block: str, role: str, first: int, per_node: int) -> int:
        """`trainer` or `rollout`: n_gpus_per_node devices of each of nnodes nodes, from node `first` on. Returns the
        next free node. Example: 2 nodes with 4 of 8 GPUs from node 0: devices 0..3 and 8..11, and 2.
        """
        node = find(self.root, (block,))
        mapping = find(self.root, (role, "device_mapping"))
        if node is None or not isinstance(node.value, dict) or not BLOCK_KEYS & set(node.value):
            return _next_free(mapping, per_node)
        given = {key: child for key, child in node.value.items() if key in BLOCK_KEYS}
        for key, child in given.items():
            self.root = drop(self.root, (block, key))
            message = f"'{block}.{key}' is another name of '{role}.device_mapping'"
            self.warnings.append(diagnostic("W01", f"{role}.device_mapping", child, message))
        if mapping is not None:
            message = f"also given as '{block}' ({node.where}) with another value; keep '{role}.device_mapping'"
            self.errors.append(diagnostic("C016", f"{role}.device_mapping", mapping, message))
            return first
        sizes = self._device_counts(block, given, node)
        device = given.get("device")
        if device is not None and device.value not in ("cpu", "cuda"):
            message = f"{shown(plain(device))} is not one of cpu | cuda"
            self.errors.append(diagnostic("C004", f"{block}.device", device, message))
        if sizes is None:
            return first
        num_nodes, used = sizes
        if device is not None and device.value == "cpu":
            self._processes(block, role, Node(num_nodes * used, node.file, node.line))
            return first
        if used > per_node:
            message = f"{used} must be <= num_gpus_per_node {per_node}"
            self.errors.append(diagnostic("C005", f"{block}.n_gpus_per_node", given["n_gpus_per_node"], message))
            return first
        ids = [n * per_node + gpu for n in range(first, first + num_nodes) for gpu in range(used)]
        listed = Node([Node(i, node.file, node.line) for i in ids], node.file, node.line)
        self.root = put(self.root, (role, "device_mapping"), listed)
        return first + num_nodes

    def _processes(self, block: str, role: str, count: Node) -> None:
        """`device: cpu`: that many processes."""
        present = find(self.root, (role, "world_size"))
        if present is not None and present.value != count.value:
            message = f"also given as '{block}' ({count.where}) with another value; keep '{role}.world_size'"
            self.errors.append(diagnostic("C016", f"{role}.world_size", present, message))
        elif find(self.root, (role,)) is None or isinstance(find(self.root, (role,)).value, dict):  # type: ignore[union-attr]
            self.root = put(self.root, (role, "world_size"), count)

    def _device_counts(self, block: str, given: dict[str, Node], node: Node) -> tuple[int, int] | None:
        """(nnodes, n_gpus_per_node); None after an error."""
        if "n_gpus_per_node" not in given:
            message = "required and not set; give the devices of a node"
            self.errors.append(diagnostic("C006", f"{block}.n_gpus_per_node", node, message))
            return None
        sizes = []
        for key in ("nnodes", "n_gpus_per_node"):
            child = given.get(key, Node(1, node.file, node.line))
            if not isinstance(child.value, int) or isinstance(child.value, bool):
                message = f"expected int, got {type_name(child)} {shown(plain(child))}"
                self.errors.append(diagnostic("C003", f"{block}.{key}", child, message))
                return None
            if child.value < 1:
                self.errors.append(diagnostic("C005", f"{block}.{key}", child, f"{child.value} must be >= 1"))
                return None
            sizes.append(child.value)
        count = sizes[0] * sizes[1]
        if count > MAX_DEVICES:
            self.errors.append(diagnostic("C018", block, node, f"{shown(count)}: more than {MAX_DEVICES} devices"))
            return None
        return sizes[0], sizes[1]


def _next_free(mapping: Node | None, per_node: int) -> int:
    """The node after the last of a mapping that was written out; 0 if there is none or it can not be read."""
    ids = parse_devices(plain(mapping))[0] if mapping is not None and mapping.value is not None else None
    return max(ids) // per_node + 1 if ids else 0

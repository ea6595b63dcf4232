"""Later pushes go where vLLM itself put the first one: nothing else is written, and what cannot be repeated is not."""

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from test_engine_protocol import Replica, tensors_of
from test_vllm_experts import checkpoint, maker
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from roll_async.inference.vllm.packed import packed_bytes
from roll_async.inference.vllm.places import WriteRecorder

EXPERTS = maker("Qwen3Moe", {"moe_intermediate_size": 64, "norm_topk_prob": True})


class Worker:
    """The model in vLLM's worker, whose core is in this process, and what reloads it."""

    def __init__(self, replica):
        core = replica.engine._llm._core
        self.reload = core.model_executor.driver_worker.worker._roll_reload
        self.model = core.model_executor.driver_worker.worker._roll_model

    def push(self, tensors):
        """Names of layers that lack tensors."""
        self.reload.open()
        self.reload.load(iter(tensors))
        return self.reload.close()

    def weights(self):
        """Parameters, and what linear layers hold in packed form alone: its product with the unit matrix."""
        found = {name: parameter.clone() for name, parameter in self.model.named_parameters()}
        for name, layer in self.model.named_modules():
            if packed_bytes(layer):
                width = get_layerwise_info(layer).restore_metadata[0]["weight"].shape[1]
                found[f"{name}, packed"] = layer.cpu_linear(torch.eye(width), layer.weight, None)
        return found

    def holds(self, weights):
        now = self.weights()
        return now.keys() == weights.keys() and all(torch.equal(now[name], weights[name]) for name in now)


@pytest.fixture(scope="module", params=["dense", "experts"])
def served(request, tmp_path_factory):
    """A replica whose worker has loaded no push, its worker, and two checkpoints."""
    folder = tmp_path_factory.mktemp("model")
    kind = {"dense": {"tied": True}, "experts": {"tied": False, "make_model": EXPERTS}}[request.param]
    replica = Replica("vllm", folder / "start", **kind)
    read = tensors_of if request.param == "dense" else lambda model: checkpoint(model, folder / "pushed")
    yield replica, Worker(replica), {name: read(replica.models[name]) for name in ("old", "new")}
    replica.close()


def test_a_push_to_known_places_is_what_vllm_loads_bit_for_bit(served):
    _, worker, tensors = served
    assert worker.push(tensors["new"]) == [] and worker.reload.places_known
    loaded = worker.weights()
    assert any("packed" in name for name in loaded)
    assert worker.push(tensors["old"]) == [] and not worker.holds(loaded)
    assert worker.push(tensors["new"][::-1]) == [] and worker.holds(loaded)


def test_layers_that_lack_tensors_are_named_and_the_next_push_is_whole(served):
    _, worker, tensors = served
    worker.push(tensors["old"])
    loaded = worker.weights()
    gone = "model.layers.1.self_attn.k_proj.weight"
    assert worker.push([pair for pair in tensors["new"] if pair[0] != gone]) == ["model.layers.1.self_attn.qkv_proj"]
    assert worker.push(tensors["old"]) == [] and worker.holds(loaded)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.norm.weight", lambda tensor: tensor[:-1]),
        ("model.norm.weight", lambda tensor: tensor.double()),
        ("model.new.weight", lambda tensor: tensor),
    ],
)
def test_a_tensor_of_another_form_is_refused_and_the_next_push_is_loaded_by_vllm(served, name, change):
    _, worker, tensors = served
    worker.push(tensors["old"])
    given = dict(tensors["new"])
    given[name] = change(given["model.norm.weight"])
    with pytest.raises(RuntimeError, match=rf"{name} \[\d+\] torch.float\d+ was not in the push before"):
        worker.push(given.items())
    worker.reload.close()
    assert not worker.reload.places_known
    assert worker.push(tensors["new"]) == [] and worker.reload.places_known


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.register_buffer("scale", torch.zeros(4, 3))


COMPUTED = {
    "another value": lambda weight, given: weight.copy_(-given),
    "a change of what was copied": lambda weight, given: (weight.copy_(given), weight.copy_(weight.exp())),
    "a change in place": lambda weight, given: (weight.copy_(given), weight.mul_(2)),
    "an output": lambda weight, given: torch.add(given, 1, out=weight),
    "what belongs to no tensor": lambda weight, given: weight.copy_(torch.ones(4, 3)),
}
REPEATED = {
    "all of it": lambda weight, given: weight.copy_(given),
    "rows, and zeros below": lambda weight, given: (weight[:2].copy_(given[2:]), weight[2:].fill_(0)),
    "no rows below": lambda weight, given: (weight.copy_(given), weight[4:].fill_(0)),
    "transposed": lambda weight, given: weight.view(3, 4).copy_(given.t()),
    "twice, as with a bias": lambda weight, given: (weight.copy_(given), weight.copy_(given), weight.copy_(weight)),
    "one number": lambda weight, given: weight[1, 2:].copy_(given.view(-1)[5:6]),
}


def recorded(load):
    model = nn.Sequential(Layer())
    recorder, before = WriteRecorder(model), torch.randn(2, 4, 3)
    with recorder:
        for _, given in recorder.watched([("w", before[1])]):
            load(model[0].weight, given)
    return model[0], recorder.places()


@pytest.mark.parametrize("how", COMPUTED)
def test_what_a_loader_computes_is_never_repeated(how):
    assert recorded(COMPUTED[how])[1] is None


@pytest.mark.parametrize("how", REPEATED)
def test_what_a_loader_copies_or_fills_in_is_written_again_with_other_values(how):
    layer, places = recorded(REPEATED[how])
    given = torch.randn(3, 4, 3)[2]
    REPEATED[how](expected := torch.zeros(4, 3), given)
    layer.weight.zero_()
    places.write("w", given)
    assert torch.equal(layer.weight, expected)


def test_a_buffer_that_a_loader_fills_is_loaded_by_vllm_every_time():
    model = nn.Sequential(Layer())
    recorder = WriteRecorder(model)
    with recorder:
        for _, given in recorder.watched([("w", torch.ones(4, 3))]):
            model[0].scale.copy_(given)
    assert recorder.places() is None


def test_a_place_that_two_tensors_write_to_is_not_repeated():
    model = nn.Sequential(Layer())
    recorder = WriteRecorder(model)
    with recorder:
        for _, given in recorder.watched([("a", torch.ones(4, 3)), ("b", torch.zeros(4, 3))]):
            model[0].weight.copy_(given)
    assert recorder.places() is None

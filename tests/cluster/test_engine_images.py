"""An engine that is shown images samples what Transformers reads in them: a tiny Qwen2.5-VL in float32."""

import asyncio
import io

import pytest

PIL = pytest.importorskip("PIL.Image")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("psutil")
np = pytest.importorskip("numpy")
safetensors = pytest.importorskip("safetensors.torch")

from dataclasses import replace

from test_engine_protocol import CONTEXT, EOS, Replica, tensors_of

from roll_async.inference.hf.adapters import add_adapters
from roll_async.inference.hf.weights import WeightTargets
from roll_async.inference.protocol import PauseMode
from roll_async.prompts.images import ImageReader
from roll_async.schema import FinishReason, Image
from roll_async.weight_sync.adapters import AdapterShape

IMAGE, START, END = 500, 501, 502
TOLERANCE = 1e-4


def tiny_model(seed, tied):
    torch.manual_seed(seed)
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "eos_token_id": EOS, "bos_token_id": None, "pad_token_id": 0, "initializer_range": 0.1,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 16,
            "fullatt_block_indexes": [1], "initializer_range": 0.2,
        },
        image_token_id=IMAGE, video_token_id=503, vision_start_token_id=START, vision_end_token_id=END,
        tie_word_embeddings=tied, dtype="float32",
    )  # fmt: skip
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = EOS
    return model


def noise(width, height, seed):
    """A file of pixels that no two images share."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    size = {"shortest_edge": 64, "longest_edge": 4096}
    processor = transformers.Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, size=size)
    processor.save_pretrained(folder)
    found = Replica("hf_infer", folder, tied=False, make_model=tiny_model, max_running=8)
    found.reader = ImageReader(str(folder))
    yield found
    found.close()


@pytest.fixture
def asked(replica):
    """A request of texts (token ids) and images (files)."""

    def of(*parts, **sampling):
        tokens, images = [], []
        for part in parts:
            if isinstance(part, bytes):
                images.append(replica.reader.image(part))
                tokens += [START, *[IMAGE] * images[-1].num_tokens, END]
            else:
                tokens += part
        return replace(replica.request(tokens, **{"max_new_tokens": 12, **sampling}), images=tuple(images))

    return of


@torch.no_grad()
def reference(replica, model, request, tokens, images=None):
    """[R] log-probs of Transformers, which reads the whole row at once, its images as pixels. `images`: others than
    the request's; none of them: blind."""
    images = request.images if images is None else images
    row, size = torch.tensor([[*request.prompt_token_ids, *tokens]]), len(request.prompt_token_ids)
    net = replica.models[model]
    given = {"input_ids": row}
    if images:
        pixels, grid = replica.reader.pixels(images)
        kinds = (row == IMAGE).int()
        if not kinds[0, size:].any():
            given |= {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}
        else:  # a sampled token is text, whatever its id; a forward pass by itself would want an image for it
            kinds[0, size:] = 0
            embedded = net.get_input_embeddings()(row)
            embedded[0, kinds[0] == 1] = torch.cat(net.get_image_features(pixels, grid, return_dict=True).pooler_output)
            places, _ = net.model.get_rope_index(row, mm_token_type_ids=kinds, image_grid_thw=grid)
            given = {"inputs_embeds": embedded, "position_ids": places}
    logits = net(attention_mask=torch.ones_like(row), **given).logits
    logprobs = logits[0, size - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def difference(found, wanted):
    return (torch.tensor(list(found)) - wanted).abs().max().item()


def generate(replica, *requests):
    async def go():
        return await asyncio.gather(*replica.start(*requests))

    return replica.runner.run(go())


def check(replica, request, answer, model="old"):
    tokens = list(answer.token_ids)
    assert len(tokens) > 0 and difference(answer.logprobs, reference(replica, model, request, tokens)) < TOLERANCE


def test_requests_of_several_sizes_of_images_and_of_none_run_beside_each_other(replica, asked):
    requests = [
        asked([11, 12], noise(16, 8, 1), [13]),
        asked(noise(40, 24, 2), [21], noise(8, 8, 3), [22, 23]),
        asked([31, 32, 33, 34]),
        asked([41], noise(64, 64, 4), noise(24, 40, 5)),  # the prompt ends with what closes an image
        asked([51, IMAGE, 52]),  # a text that says an image's token shows none
    ]
    for request, answer in zip(requests, generate(replica, *requests), strict=True):
        check(replica, request, answer)


def test_prompts_longer_than_a_step_are_read_in_parts(replica, asked):
    """A step reads 512 tokens: of three prompts of 300 it cuts one within an image."""
    requests = [
        asked(range(30 + i, 60 + i), *(noise(64, 64, 10 * i + n) for n in range(4)), [7, 8], max_new_tokens=6)
        for i in range(3)
    ]
    assert all(250 < len(request.prompt_token_ids) < 512 for request in requests)
    before = [asked([5], noise(16, 16, 9), max_new_tokens=40)]

    async def go():
        tasks = await replica.started(*before)
        return await asyncio.gather(*tasks, *replica.start(*requests))

    for request, answer in zip(before + requests, replica.runner.run(go()), strict=True):
        check(replica, request, answer)


def test_a_resumed_request_goes_on_as_the_same_text(replica, asked):
    request = asked([11, 12], noise(24, 16, 1), [13], temperature=0.0, max_new_tokens=20)
    (whole,) = generate(replica, request)
    for cut in (1, 7):
        more = asked([11, 12], noise(24, 16, 1), [13, *whole.token_ids[:cut]], temperature=0.0, max_new_tokens=20 - cut)
        (rest,) = generate(replica, more)
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
        assert list(rest.logprobs) == pytest.approx(list(whole.logprobs[cut:]), abs=1e-5)
    request = asked([11, 12], noise(24, 16, 1), [13, 77, 78, 79])
    (answer,) = generate(replica, request)
    check(replica, request, answer)


def test_other_images_and_another_order_and_none_are_read_otherwise(replica, asked):
    files = noise(24, 24, 1), noise(24, 24, 2)
    pair, swapped = asked([11], *files, [13]), asked([11], *files[::-1], [13])
    other = (replica.reader.image(noise(24, 24, 3)), pair.images[1])
    for request, answer in zip((pair, swapped), generate(replica, pair, swapped), strict=True):
        check(replica, request, answer)
        for images in (request.images[::-1], other, ()):
            moved = reference(replica, "old", request, list(answer.token_ids), images=images)
            assert difference(answer.logprobs, moved) > 1e-2


def test_the_tower_sees_an_image_once_for_all_samples_of_its_prompt(replica, asked, monkeypatch):
    model, seen = replica.engine._model, []
    look = model.get_image_features
    monkeypatch.setattr(
        model, "get_image_features", lambda pixels, *a, **k: seen.append(pixels) or look(pixels, *a, **k)
    )
    request = asked([11], noise(24, 16, 77), [13])
    samples = [replace(request, request_id=f"sample {i}") for i in range(4)]
    for sample, answer in zip(samples, generate(replica, *samples), strict=True):
        check(replica, sample, answer)
    assert len(seen) == 1


def test_images_that_do_not_fit_the_prompt_are_refused_and_the_engine_goes_on(replica, asked):
    request = asked([11], noise(16, 16, 1), [13])
    swollen = replace(request, images=(replace(request.images[0], grid=(9, 9)),))
    with pytest.raises(ValueError, match="4 image tokens for images of 81"):
        generate(replica, swollen)
    shrunk = replace(request, images=(replace(request.images[0], grid=(1, 2)),))
    with pytest.raises(ValueError, match="an image of 2 tokens in its prompt has 4 in the model"):
        generate(replica, shrunk)
    broken = replace(request, images=(Image(data=b"none", grid=(2, 2)),))
    with pytest.raises(ValueError, match="4 bytes are no image"):
        generate(replica, broken)
    (answer,) = generate(replica, replace(request, request_id="again"))
    check(replica, request, answer)


def test_a_pause_while_an_image_is_looked_at_ends_its_request_and_leaves_nothing_behind(replica, asked):
    async def go():
        tasks = replica.start(*(asked([11], noise(64, 64, i), [13], max_new_tokens=100) for i in range(4)))
        await asyncio.sleep(0)  # they are admitted, and in the tower
        await replica.engine.pause(PauseMode.ABORT)
        assert all(task.done() and task.result().finish_reason is FinishReason.ABORT for task in tasks)
        await replica.engine.resume()

    replica.runner.run(go())
    request = asked([11], noise(16, 16, 1), [13])
    (answer,) = generate(replica, request)
    check(replica, request, answer)
    assert not replica.engine._feeder._shown


def test_a_score_of_text_is_that_of_transformers(replica):
    row = [11, 12, 13, 14, 15]
    found = replica.runner.run(replica.engine.score(row))
    request = replica.request(row[:1])
    assert difference(found, reference(replica, "old", request, row[1:])) < TOLERANCE


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_has_the_names_that_a_push_must_have_and_adapters_are_beside_its_layers(tmp_path, tied):
    model = tiny_model(1, tied)
    model.save_pretrained(tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert WeightTargets(model, model.config.model_type).names == saved.keys()
    halves = add_adapters(model, AdapterShape(rank=2, layers=("down_proj", "q_proj")))
    layers = [f"model.layers.{i}.{name}.lora_" for i in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")]
    assert len(halves) == 8 and all(name.startswith(tuple(layers)) for name in halves), halves.keys()


def hub_tensors(model):
    """As checkpoints name them."""
    names = {"model.language_model.": "model.", "model.visual.": "visual."}
    return [
        (next((hub + name.removeprefix(live) for live, hub in names.items() if name.startswith(live)), name), tensor)
        for name, tensor in tensors_of(model)
    ]


def test_a_push_of_the_tower_changes_what_is_seen_bit_for_bit(replica, asked):
    """Last: the replica serves other weights then."""
    request = asked([11, 12], noise(24, 24, 1), [13])
    (before,) = generate(replica, request)
    replica.runner.run(replica.push_tensors(hub_tensors(replica.models["new"]), 1))
    for name, tensor in hub_tensors(replica.models["new"]):
        assert torch.equal(replica.engine._targets[name], tensor), name
    (after,) = generate(replica, replace(request, request_id="after"))
    check(replica, request, after, "new")
    assert after.version_runs == ((1, len(after.token_ids)),)
    # The tower alone: all other tensors stay.
    mixed = tiny_model(2, False)
    mixed.model.visual.load_state_dict(replica.models["old"].model.visual.state_dict())
    replica.models["mixed"] = mixed
    replica.runner.run(replica.push_tensors(hub_tensors(mixed), 2))
    (seen,) = generate(replica, replace(request, request_id="mixed"))
    check(replica, request, seen, "mixed")
    assert difference(seen.logprobs, reference(replica, "new", request, list(seen.token_ids))) > 1e-2
    assert len(before.token_ids) > 0

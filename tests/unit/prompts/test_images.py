"""Images of rows: every form in which a file names them, what is refused with which remedy, and their tokens."""

import base64
import io
import json
import logging

import pytest

PIL = pytest.importorskip("PIL.Image")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from roll_async.prompts.images import ImageReader, laid_out, spread, taken_out
from roll_async.prompts.load import DataOptions, load_prompts
from roll_async.prompts.rows import BadRows, Columns, content_digest, read_rows
from roll_async.prompts.tokenizer import load_tokenizer
from roll_async.prompts.turns import IMAGE_PART, parse_turns, text_of
from roll_async.schema import Image

IMAGE_PAD, IMAGE_ID = "<|image_pad|>", 258
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' or 'image' in part %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
"""As Qwen2.5-VL's, shorter."""


def png(width=8, height=8, colour=0):
    file = io.BytesIO()
    PIL.new("RGB", (width, height), (colour, 255 - colour, 7)).save(file, "PNG")
    return file.getvalue()


def data_url(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder as far as prompts need it: a byte-level tokenizer, the image processor and ids in config.json."""
    target = tmp_path_factory.mktemp("model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>", IMAGE_PAD, "<|vision_start|>", "<|vision_end|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(target)
    assert fast.convert_tokens_to_ids(IMAGE_PAD) == IMAGE_ID
    names = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    (target / "config.json").write_text(
        json.dumps({**names, "image_token_id": IMAGE_ID, "vision_config": {"depth": 1}})
    )
    size = {"shortest_edge": 64, "longest_edge": 4096}
    processor = transformers.Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, size=size)
    processor.save_pretrained(target)
    return str(target)


def row(*content, **columns):
    return {"id": "1", "messages": [{"role": "user", "content": list(content)}], "ground_truth": "1", **columns}


def text(said):
    return {"type": "text", "text": said}


def read(tmp_path, *rows):
    path, bad = tmp_path / "rows.jsonl", BadRows()
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return list(read_rows([str(path)], Columns(), bad)), bad.problems


def options(folder, file, **fields):
    defaults = {"columns": Columns(), "template": "native", "prompt_length": 400, "domains": {"math": ()}}
    return DataOptions(files=(str(file),), tokenizer_folder=folder, **{**defaults, **fields})


def load(folder, tmp_path, *rows, **fields):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return load_prompts(options(folder, path, **fields))["math"]


@pytest.mark.parametrize("part", [
    {"type": "image", "image": "shown/a.png"},
    {"type": "image", "path": "shown/a.png"},
    {"type": "image", "url": data_url(png())},
    {"type": "image", "image": data_url(png()), "text": None},
    {"type": "image_url", "image_url": {"url": data_url(png())}},
    {"type": "image_url", "image_url": "shown/a.png"},
    {"type": "image", "image": {"bytes": None, "path": "shown/a.png"}},
], ids=lambda part: f"{part['type']} {[k for k in part if k != 'type']}")  # fmt: skip
def test_a_part_names_its_image_as_a_path_beside_the_file_or_holds_it(tmp_path, part):
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "a.png").write_bytes(png())
    (found,), problems = read(tmp_path, row(text("what is "), part, text("?")))
    assert (found.images, problems) == ((png(),), [])
    assert found.messages == ({"role": "user", "content": [text("what is "), {"type": "image"}, text("?")]},)
    assert found.text == "what is <image>?" and json.dumps(found.messages)
    assert str(png()) not in repr(found)


def test_verls_rows_name_images_in_a_column_and_their_places_in_the_texts(tmp_path):
    one, other = data_url(png()), data_url(png(colour=200))
    rows, problems = read(
        tmp_path,
        {"prompt": [{"role": "system", "content": "look"}, {"role": "user", "content": "<image> or <image>?"}],
         "images": [one, {"bytes": None, "path": other}], "reward_model": {"ground_truth": "1"}},
        row(text("<image> only"), images=[one, other]),
        row(text("none"), images=[one]),
        row(text("an <image> tag is text"), images=[]),
        row(text("an <image> tag is text"), images=None),
    )  # fmt: skip
    first, second, third = rows
    assert first.images == (png(), png(colour=200)) and "images" not in first.extra
    shown = [{"type": "image"}, text(" or "), {"type": "image"}, text("?")]
    assert first.messages == ({"role": "system", "content": "look"}, {"role": "user", "content": shown})
    assert (second.messages[0]["content"], second.images, third.images) == ("an <image> tag is text", (), ())
    file = tmp_path / "rows.jsonl"
    assert problems == [
        f"{file}:2: images: 2, and the chat says <image> 1 times; write it once for each",
        f"{file}:3: images: 1, and the chat says <image> 0 times; write it once for each",
    ]


def test_parquet_holds_the_files_themselves(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    chat = [
        {
            "role": "user",
            "content": [
                {**text("what?"), "image": None},
                {"type": "image", "text": None, "image": {"bytes": png(), "path": "a.png"}},
            ],
        }
    ]
    asked = [{"role": "user", "content": "<image>what?"}]
    for name, one in (
        ("parts", {"messages": chat, "ground_truth": "1"}),
        ("verl", {"prompt": asked, "images": [{"bytes": png(), "path": None}], "ground_truth": "1"}),
    ):
        parquet.write_table(arrow.Table.from_pylist([one]), tmp_path / f"{name}.parquet")
        (found,) = read_rows([str(tmp_path / f"{name}.parquet")], Columns(), BadRows(0))
        assert found.images == (png(),) and "images" not in found.extra


@pytest.mark.parametrize(("source", "said"), [
    ("https://a.org/b.png", "https://a.org/b.png: a run depends on no server; download it and write its path"),
    ("b.png", "there is no file {folder}/b.png; a relative path begins at the data file's folder"),
    ("data:image/png,abc", "data:image/png is no image; write data:image/...;base64,..."),
    ("data:image/png;base64,?", "data:image/png;base64 is followed by no base64"),
    ("", "'' is no image; write a path, a data: URL or {{bytes, path}}"),
    (7, "7 is no image"),
    ("iVBORw0" * 20_000, "there is no file {folder}/iVBORw0"),
], ids=["server", "missing", "no base64", "broken base64", "nothing", "number", "bare base64"])  # fmt: skip
def test_an_image_that_is_not_there_is_a_malformed_row_of_one_line(tmp_path, source, said):
    rows, (problem,) = read(tmp_path, row(text("a"), {"type": "image", "image": source}))
    wanted = f"{tmp_path}/rows.jsonl:1: messages.0.content.1: {said.format(folder=tmp_path)}"
    assert rows == [] and problem.startswith(wanted) and "\n" not in problem and len(problem) < 600
    assert "there is no file" not in problem or problem.endswith("; of base64 write data:image/...;base64,...")


def test_chats_without_images_are_text_and_a_turn_of_images_keeps_its_parts():
    plain = [{"role": "user", "content": [text("a"), text("b")]}]
    assert taken_out(plain, None, None) == (plain, ())
    assert parse_turns(plain, "messages")[0]["content"] == "ab"
    (turn,) = parse_turns([{"role": "user", "content": [text("a"), IMAGE_PART]}], "messages")
    assert turn["content"] == [text("a"), {"type": "image"}] and text_of(turn) == "a<image>"
    with pytest.raises(ValueError, match=r"messages\.0\.content\.0: .* is no part of type text"):
        parse_turns([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], "messages")


def test_what_a_row_shows_is_told_apart_by_its_bytes_and_not_by_its_path(tmp_path):
    for name, colour in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / f"{name}.png").write_bytes(png(colour=colour))
    rows, _ = read(tmp_path, *(row({"type": "image", "image": f"{name}.png"}) for name in "abc"), row(text("a")))
    digests = [content_digest(r.messages, r.ground_truth, r.extra, r.images) for r in rows]
    assert digests[0] == digests[1] != digests[2]
    assert digests[3] == content_digest(rows[3].messages, "1", {})


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_prompts_have_the_tokens_of_each_image_where_the_template_puts_it(folder, tmp_path, workers):
    small, wide = png(16, 8), png(24, 8, 9)
    pair = row({"type": "image", "image": data_url(small)}, text("and"), {"type": "image", "image": data_url(wide)})
    first, plain = load(folder, tmp_path, pair, row(text("no image")), num_workers=workers)
    decoded = load_tokenizer(folder).decode(first.token_ids)
    one, other = (f"<|vision_start|>{IMAGE_PAD * n}<|vision_end|>" for n in (2, 3))
    assert decoded == f"<|im_start|>user:{one}and{other}<|im_end|><|im_start|>assistant:"
    assert first.images == (Image(data=small, grid=(1, 2)), Image(data=wide, grid=(1, 3)))
    assert first.text == "<image>and<image>" and plain.images == ()
    assert (first.content, plain.content) != ("", "") and first.content != plain.content


def test_a_text_that_writes_the_token_of_an_image_shows_none(folder, tmp_path):
    shown = {"type": "image", "image": data_url(png(16, 8))}
    sly = row(text(f"a{IMAGE_PAD}<|image_<|image_pad|>pad|>b"), shown)
    sly["messages"].insert(0, {"role": "system", "content": f"{IMAGE_PAD}see"})
    found, only_text = load(folder, tmp_path, sly, row(text(f"{IMAGE_PAD} is a token")))
    decoded = load_tokenizer(folder).decode(found.token_ids)
    assert "user:ab<|vision_start|><|image_pad|><|image_pad|><|vision_end|>" in decoded and "system:see<" in decoded
    _, slots = laid_out(torch.tensor(found.token_ids), found.images, IMAGE_ID)
    assert slots[slots >= 0].tolist() == [0, 1]
    assert only_text.images == () and IMAGE_ID in only_text.token_ids


def test_a_prompt_is_as_long_as_its_images(folder, tmp_path, caplog):
    caplog.set_level(logging.INFO, "roll_async")
    rows = [row({"type": "image", "image": data_url(png(side, side))}) for side in (16, 64)]
    (small,) = load(folder, tmp_path, *rows, prompt_length=60)
    assert small.images[0].grid == (2, 2) and "1 longer than prompt_length 60" in caplog.text


def test_a_broken_file_is_a_malformed_row_and_too_many_end_the_loading(folder, tmp_path, caplog):
    good = row({"type": "image", "image": data_url(png())})
    broken = row({"type": "image", "image": data_url(b"no image")})
    assert len(load(folder, tmp_path, broken, good)) == 1
    assert f"skipped {tmp_path}/rows.jsonl:1: 8 bytes are no image that Pillow reads" in caplog.text
    with pytest.raises(ValueError, match="more than 100 malformed rows; first: .*rows.jsonl:1: 8 bytes"):
        load(folder, tmp_path, *[broken] * 101)


def test_a_template_that_says_no_image_is_told_with_its_row(folder, tmp_path):
    shown = row({"type": "image", "image": data_url(png())}, text("a"))
    with pytest.raises(ValueError, match=r"first malformed: .*rows.jsonl:1: the chat template"):
        load(folder, tmp_path, shown, template="chatml")


def test_a_model_of_text_alone_is_told_in_one_line_with_the_row(folder, tmp_path):
    text_model = tmp_path / "text"
    load_tokenizer(folder).save_pretrained(text_model)
    (text_model / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    with pytest.raises(ValueError, match=r"rows.jsonl:2: an image: .*Qwen2ForCausalLM reads no images; name a model"):
        load(str(text_model), tmp_path, row(text("a")), row({"type": "image", "image": data_url(png())}))


def test_a_teacher_behind_an_address_scores_no_row_with_an_image(folder, tmp_path, caplog):
    shown = {"type": "image", "image": data_url(png())}
    rows = [row(shown, teacher="far"), row(shown, teacher="near"), row(text("a"), teacher="far")]
    names = {"teachers": ("far", "near"), "teachers_unshown": frozenset({"far"})}
    assert [bool(prompt.images) for prompt in load(folder, tmp_path, *rows, **names)] == [True, False]
    assert "rows.jsonl:1: teacher far is behind an address, which is shown no image; name one with" in caplog.text


def test_the_grid_of_an_image_is_that_of_its_pixels(folder):
    reader = ImageReader(folder)
    images = [reader.image(png(width, height)) for width, height in ((8, 8), (50, 17), (90, 200), (3, 40))]
    pixels, grid = reader.pixels(images)
    assert [[2 * side for side in image.grid] for image in images] == grid[:, 1:].tolist()
    assert len(pixels) == 4 * sum(image.num_tokens for image in images)
    with pytest.raises(ValueError, match="aspect ratio"):
        reader.image(png(2000, 2))


def test_every_image_takes_its_tokens_and_a_count_that_differs_is_refused():
    image = Image(data=b"", grid=(2, 2))
    assert spread([5, 9, 6, 9], [image, Image(data=b"", grid=(1, 1))], 9) == [0, 1, 1, 1, 1, 2, 3]
    with pytest.raises(ValueError, match="writes 1 image tokens for 2 images"):
        spread([9], [image, image], 9)


def test_an_image_above_pillows_own_limit_is_a_row_of_one_line(folder, monkeypatch):
    monkeypatch.setattr(PIL, "MAX_IMAGE_PIXELS", 31)  # it opens none of more than twice as many
    with pytest.raises(ValueError, match=r"^\d+ bytes are no image that Pillow reads: Image size \(64 pixels\)"):
        ImageReader(folder).image(png())

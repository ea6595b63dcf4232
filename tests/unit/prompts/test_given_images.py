"""Chats with images that are trained on as they are: their tokens, masks and files."""

import json

import pytest

pytest.importorskip("PIL.Image")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from roll_async.prompts.given import GivenOptions, digest_of, load_given
from tests.unit.prompts.test_images import IMAGE_ID, data_url, folder, png  # noqa: F401  # the fixture


@pytest.fixture
def load(folder, tmp_path):  # noqa: F811
    (tmp_path / "large.png").write_bytes(png(24, 16))

    def rows(*records, **fields):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        defaults = {"key": "actor_train.data_args.file_name", "sequence_length": 200}
        return load_given(GivenOptions(**{**defaults, "files": (str(path),), "tokenizer_folder": folder, **fields}))

    return rows


def asked(*parts):
    return {"role": "user", "content": list(parts)}


LARGE = {"type": "image", "image": "large.png"}
SMALL = {"type": "image", "image": data_url(png())}
TOLD = {"role": "assistant", "content": "yes"}


def test_a_chat_is_trained_on_with_every_token_of_its_images_and_none_of_them_in_the_mask(load):
    text = {"type": "text", "text": "Is it <|image_pad|>?"}
    row, plain = load({"messages": [asked(LARGE, text), TOLD, asked(SMALL), TOLD]}, {"prompt": "a", "completion": "b"})
    assert [image.grid for image in row.images] == [(2, 3), (1, 1)] and plain.images == ()
    places = [i for i, token in enumerate(row.tokens) if token == IMAGE_ID]
    assert len(places) == 7 and len(row.mask) == len(row.tokens)
    assert not any(row.mask[i] for i in places) and sum(row.mask) == 2 * len("yes.")
    (other,) = load({"messages": [asked(SMALL, text), TOLD]})
    (changed,) = load({"messages": [asked({**SMALL, "image": data_url(png(colour=9))}, text), TOLD]})
    assert changed.tokens == other.tokens and digest_of([changed]) != digest_of([other])


def test_pairs_have_the_images_of_their_prompt_and_long_rows_with_images_are_not_cut(load):
    pair = {"messages": [asked(LARGE)], "chosen": "yes", "rejected": "no"}
    assert [len(row.images) for row in load(pair, pairs=True)] == [1, 1]
    column = {"messages": [{"role": "user", "content": "<image>?"}], "images": ["large.png"], "completion": "yes"}
    assert [image.grid for image in load(column)[0].images] == [(2, 3)]
    with pytest.raises(ValueError, match="no row to train on"):
        load(column, sequence_length=30, long_rows="cut")
    with pytest.raises(ValueError, match="prompt_token_ids: an image stands there, which a dump does not hold"):
        load({"prompt_token_ids": [1, IMAGE_ID], "response_token_ids": [2]})
    with pytest.raises(ValueError, match="messages.0.content.0: there is no file .*gone.png"):
        load({"messages": [asked({**LARGE, "image": "gone.png"}), TOLD]})

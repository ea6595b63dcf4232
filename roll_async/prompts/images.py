"""Images of rows: where they are named, and what a model reads of them: patches of pixels, and where in the row and
the plane each token stands.

Of Qwen2.5-VL's kind: an image is a grid of tokens, all of one id, and its pixels go through a tower of their own whose
outputs take the places of those tokens. Trainer and engine make the same pixels of the same file: Transformers' image
processor of the model folder, on Pillow, whatever else is installed.
Shape letters: T tokens of a row, P patches, C values of a patch.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from roll_async.prompts.turns import IMAGE, IMAGE_PART
from roll_async.schema import Image

if TYPE_CHECKING:
    from torch import Tensor

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_KEYS = ("bytes", "image", "image_url", "path", "url")
"""Under which parts, and what is in them, name an image."""
_MOST_PIXELS = 1 << 26
"""64 million: a file that unpacks to more is refused before it is unpacked."""


def taken_out(turns: object, column: object, folder: Path) -> tuple[object, tuple[bytes, ...]]:
    """A row's chat with `IMAGE_PART` in the place of each of its images, and their files in that order.
    `column`: images that stand where the chat's texts say `<image>`; `folder`: where relative paths begin. What is no
    chat is left to `turns.py: parse_turns`. Raises ValueError, with key and remedy, for an image that is not there.
    """
    if not isinstance(turns, list):
        return turns, ()
    listed = column if isinstance(column, list) else []
    said = sum(_text(part).count(IMAGE) for turn in turns for part in _parts(turn))
    if listed and said != len(listed):
        raise ValueError(f"images: {len(listed)}, and the chat says {IMAGE} {said} times; write it once for each")
    sources, files, chat = iter(listed), list[bytes](), list[object]()
    for number, turn in enumerate(turns):
        parts = [piece for part in _parts(turn) for piece in (_pieces(part, sources) if listed else [part])]
        before = len(files)
        for index, part in enumerate(parts):
            if (source := _source(part)) is not None:
                files.append(_file(source, f"messages.{number}.content.{index}", folder))
                parts[index] = IMAGE_PART
        chat.append({**turn, "content": parts} if len(files) > before else turn)
    return chat, tuple(files)


def _parts(turn: object) -> list:
    """Of the content of a turn; none where it has another form."""
    content = turn.get("content") if isinstance(turn, dict) else None
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content) if isinstance(content, list) else []


def _text(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else ""


def _pieces(part: object, sources: Iterator[object]) -> list:
    """A part of text cut at each `IMAGE`, with the next image there."""
    if IMAGE not in _text(part):
        return [part]
    first, *rest = _text(part).split(IMAGE)
    found = [{"type": "text", "text": first}]
    for piece in rest:
        found += [{"type": "image", "image": next(sources)}, {"type": "text", "text": piece}]
    return [part for part in found if part["type"] == "image" or part["text"]]


def _source(part: object) -> object:
    """What a part says of its image; None for one of another type."""
    if not isinstance(part, dict) or part.get("type") not in ("image", "image_url"):
        return None
    return next((part[key] for key in _KEYS if part.get(key)), "")  # parquet has null for a key that a part lacks


def _file(source: object, key: str, folder: Path) -> bytes:
    if isinstance(source, dict):
        source = next((source[key] for key in _KEYS if source.get(key)), None)
    if isinstance(source, bytes) and source:
        return source
    if not isinstance(source, str) or not source:
        raise ValueError(f"{key}: {source!r:.60} is no image; write a path, a data: URL or {{bytes, path}}")
    if source.startswith("data:"):
        head, _, text = source.partition(",")
        if not (head.startswith("data:image/") and head.endswith(";base64")):
            raise ValueError(f"{key}: {head:.60} is no image; write data:image/...;base64,...")
        try:
            return base64.b64decode(text, validate=True)
        except ValueError as error:
            raise ValueError(f"{key}: {head} is followed by no base64: {error}") from error
    if source.startswith(("http://", "https://")):
        raise ValueError(f"{key}: {source:.80}: a run depends on no server; download it and write its path")
    path = folder / source.removeprefix("file://")
    no_name = len(str(path)) > 4095 or max(map(len, path.parts), default=0) > 255  # as of base64
    if no_name or not path.is_file():  # another OSError may pass: files are read again then
        remedy = "a relative path begins at the data file's folder; of base64 write data:image/...;base64,..."
        raise ValueError(f"{key}: there is no file {str(path):.300}; {remedy}")
    return path.read_bytes()


@cache
def image_reader(folder: str) -> ImageReader:
    """The one of a model folder in this process. Raises as its constructor."""
    return ImageReader(folder)


def spread(tokens: Sequence[int], images: Sequence[Image], token_id: int) -> list[int]:
    """Positions of a row whose images have one token each, every image's as often as it has tokens: what a template
    writes becomes what a model reads. Raises ValueError unless there are as many image tokens as images.

    Worked example: tokens `a I b` with one image of 2 x 2: 0 1 1 1 1 2.
    """
    counts = [image.num_tokens for image in images]
    if (written := sum(token == token_id for token in tokens)) != len(counts):
        raise ValueError(
            f"the chat template writes {written} image tokens for {len(counts)} images; use data_args.template: native "
            "with the model's own template"
        )
    each = iter(counts)
    return [place for place, token in enumerate(tokens) for _ in range(next(each) if token == token_id else 1)]


class ImageReader:
    """For one model folder."""

    def __init__(self, folder: str) -> None:
        """Raises ValueError, one line, for a model that reads no images, and for one that cannot be read here."""
        file = Path(folder, "config.json")
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if config.get("vision_config") is None or not isinstance(config.get("image_token_id"), int):
            kind = ", ".join(config.get("architectures") or ["a folder without config.json"])
            raise ValueError(f"{folder}: {kind} reads no images; name a model that does (Qwen2.5-VL)")
        self.token_id: int = config["image_token_id"]
        """Of each token of an image."""
        if not any(Path(folder, name).is_file() for name in _PROCESSORS):
            raise ValueError(
                f"{folder} holds no {_PROCESSORS[0]}, which says how images are cut into patches; copy the file there "
                "from the model that this one is made of"
            )
        try:
            import PIL.Image
        except ImportError as error:
            raise ValueError("images are read by Pillow, which is missing: pip install 'roll_async[images]'") from error
        from transformers import Qwen2VLImageProcessorPil
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        self._open, self._broken = PIL.Image.open, (PIL.UnidentifiedImageError, PIL.Image.DecompressionBombError)
        self._processor, self._resized = Qwen2VLImageProcessorPil.from_pretrained(folder), smart_resize

    def image(self, data: bytes) -> Image:
        """Of a file's content. Raises ValueError for what is no image, and for one of a shape that cannot be cut."""
        picture, processor = self._picture(data), self._processor
        side, size = processor.patch_size * processor.merge_size, processor.size
        # As `pixels` cuts it, without the patches, which take ten times as long.
        height, width = self._resized(picture.height, picture.width, side, size["shortest_edge"], size["longest_edge"])
        return Image(data=data, grid=(height // side, width // side))

    def pixels(self, images: Sequence[Image]) -> tuple[Tensor, Tensor]:
        """Patches [P,C] float32 of all images one after another, and the grid [images,3] of each in patches (1, rows,
        columns). Raises as `image`.
        """
        found = self._processor([self._picture(image.data) for image in images], return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"]

    def _picture(self, data: bytes):  # noqa: ANN202 (PIL.Image.Image, imported late)
        try:
            picture = self._open(io.BytesIO(data))
            if picture.width * picture.height > _MOST_PIXELS:
                raise ValueError(f"an image of {picture.width} x {picture.height} pixels; make it smaller")
            return picture.convert("RGB")
        except (*self._broken, OSError) as error:
            raise ValueError(f"{len(data)} bytes are no image that Pillow reads: {error}") from error


def laid_out(tokens: Tensor, images: Sequence[Image], token_id: int) -> tuple[Tensor, Tensor]:
    """Of a row's tokens [T] int64: positions [3,T] int64 in time, height and width; and [T] int64 which of the tower's
    outputs for these images (one after another) takes the token's place, -1 where none does.

    Text counts on in all three; an image stands at one moment, its tokens at their row and column from there, and the
    text after it goes on from the larger of its sides (Qwen2-VL, arXiv:2409.12191, section 2.1). Image tokens beyond
    those of the images are text: a policy may sample them. Raises ValueError for fewer.

    Worked example: tokens `a I I I I b` with one image of 2 x 2: time 0 1 1 1 1 3, height 0 1 1 2 2 3, width
    0 1 2 1 2 3; outputs -1 0 1 2 3 -1.
    """
    import torch

    places = (tokens == token_id).nonzero()[:, 0]
    wanted = sum(image.num_tokens for image in images)
    if len(places) < wanted:
        raise ValueError(f"{len(places)} image tokens for images of {wanted}")
    slots = torch.full_like(tokens, -1)
    slots[places[:wanted]] = torch.arange(wanted)
    axes = torch.arange(len(tokens)).expand(3, -1).clone()
    first = 0
    for image in images:
        rows, columns = image.grid
        start = int(places[first])
        first += image.num_tokens
        end = start + image.num_tokens
        begin = axes[0, start].clone()
        axes[0, start:end] = begin
        axes[1, start:end] = begin + torch.arange(rows).repeat_interleave(columns)
        axes[2, start:end] = begin + torch.arange(columns).repeat(rows)
        axes[:, end:] += begin + max(rows, columns) - axes[0, end] if end < len(tokens) else 0
    return axes, slots

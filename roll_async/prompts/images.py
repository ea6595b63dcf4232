"""What a model reads of images: patches of pixels, and where in the row and the plane each token stands.

Of Qwen2.5-VL's kind: an image is a grid of tokens, all of one id, and its pixels go through a tower of their own whose
outputs take the places of those tokens. Trainer and engine make the same pixels of the same file: Transformers' image
processor of the model folder, on Pillow, whatever else is installed.
Shape letters: T tokens of a row, P patches, C values of a patch.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from roll_async.checkpoint.folders.hf_config import HfConfig, read_json
from roll_async.schema import Image

if TYPE_CHECKING:
    from torch import Tensor

_PROCESSOR = "preprocessor_config.json"
_MOST_PIXELS = 1 << 26
"""64 million: a file that unpacks to more is refused before it is unpacked."""


class ImageReader:
    """For one model folder."""

    def __init__(self, folder: str) -> None:
        """Raises ValueError, one line, for a model that reads no images, and for one that cannot be read here."""
        config = HfConfig(read_json(Path(folder, "config.json")), f"{folder}/config.json")
        if "vision_config" not in config:
            raise ValueError(f"{folder}: {config.architecture()} reads no images; name a model that does (Qwen2.5-VL)")
        self.token_id = config.integer("image_token_id")
        """Of each token of an image."""
        if not Path(folder, _PROCESSOR).is_file():
            raise ValueError(f"{folder} holds no {_PROCESSOR}, which says how images are cut into patches")
        try:
            import PIL.Image
        except ImportError as error:
            raise ValueError("images are read by Pillow, which is missing: pip install 'roll_async[images]'") from error
        from transformers import Qwen2VLImageProcessorPil

        self._open, self._broken = PIL.Image.open, PIL.UnidentifiedImageError
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def image(self, data: bytes) -> Image:
        """Of a file's content. Raises ValueError for what is no image, and for one of a shape that cannot be cut."""
        _, grid = self.pixels([Image(data=data, grid=(0, 0))])
        merge = self._processor.merge_size
        return Image(data=data, grid=(int(grid[0, 1]) // merge, int(grid[0, 2]) // merge))

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
        except (self._broken, OSError) as error:
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

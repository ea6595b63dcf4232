"""The sizes of a model that ranks must share evenly, and what its tokenizer and its longest row must fit into."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from roll_async.checkpoint.folders.hf_config import HfConfig, read_json
from roll_async.checkpoint.rotary import Rotary


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Sizes that a parallel layout must divide."""

    source: str
    """Name of the model in messages."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    num_experts: int = 0
    """0 = dense."""
    moe_intermediate_size: int = 0

    @classmethod
    def of(cls, config: HfConfig) -> ModelSizes:
        """Raises ValueError for a config.json without them."""
        heads = config.integer("num_attention_heads")
        experts = config.integer("num_experts", "num_local_experts", "n_routed_experts", default=0)
        return cls(
            source=config.source,
            num_hidden_layers=config.integer("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=config.integer("num_key_value_heads", default=heads),
            # Models whose layers all have experts may have none beside theirs.
            intermediate_size=config.integer("intermediate_size", "moe_intermediate_size"),
            vocab_size=config.integer("vocab_size"),
            num_experts=experts,
            moe_intermediate_size=config.integer("moe_intermediate_size", default=0) if experts else 0,
        )


def longest_context(config: HfConfig) -> int:
    """Positions of a model. Of the kinds of scaling that the trainer knows, vLLM and SGLang multiply
    max_position_embeddings by the factor of `linear` alone: with yarn and llama3 it is the scaled length already.
    """
    rotary, positions = Rotary.of(config), config.integer("max_position_embeddings")
    return int(positions * rotary.parameters.number("factor")) if rotary.kind == "linear" else positions


def embedding_rows(folder: Path, vocab_size: int) -> int:
    """Rows of the embedding in a model's safetensors files, from their headers; `vocab_size` without such files."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    name = "model.embed_tokens.weight"
    if index.is_file():
        single = folder / str(read_json(index).get("weight_map", {}).get(name, ""))
    if not single.is_file():
        return vocab_size
    with open(single, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= single.stat().st_size - 8:  # {} is the shortest header
            return vocab_size  # not a safetensors file: who loads it says so
        header = json.loads(file.read(length))
    return int(header[name]["shape"][0]) if name in header else vocab_size


def tokenizer_rows(folder: str) -> int:
    """Rows of the embedding that a folder's tokenizer needs: its highest id, added tokens included, and one. 0 for a
    folder without a file that tells. Raises ValueError for one that cannot be read.
    """
    return max(_token_ids(Path(folder)), default=-1) + 1


def pieces(folder: str) -> dict[str, int]:
    """Ids of the pieces of a folder's tokenizer, without added tokens; empty for a folder without a file that tells.
    Raises ValueError for one that cannot be read.
    """
    fast = _read(Path(folder), "tokenizer.json")
    vocabulary = (fast.get("model") or {}).get("vocab") or _read(Path(folder), "vocab.json")
    # Unigram models have a list of pieces: the id is the place in it.
    return vocabulary if isinstance(vocabulary, dict) else {piece: i for i, (piece, _) in enumerate(vocabulary)}


def _read(folder: Path, name: str) -> dict:
    return read_json(folder / name) if (folder / name).is_file() else {}


def _token_ids(folder: Path) -> Iterator[int]:
    yield from pieces(str(folder)).values()
    yield from (token["id"] for token in _read(folder, "tokenizer.json").get("added_tokens") or ())
    yield from _read(folder, "added_tokens.json").values()
    # Its keys are ids, as JSON's keys are: strings.
    yield from map(int, _read(folder, "tokenizer_config.json").get("added_tokens_decoder") or ())
    if (folder / "vocab.txt").is_file():
        with open(folder / "vocab.txt", encoding="utf-8") as file:
            yield sum(1 for _ in file) - 1

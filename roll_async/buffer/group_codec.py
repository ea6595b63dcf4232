"""One group as a JSON header and one block of bytes. No pickle, so that reading a foreign ledger cannot run code.

Block: prompt ids, the files of the prompt's images, then per sample its prompt ids (absent when equal to the prompt's),
response ids (int32), behaviour log-probs (float32), loss mask (1 byte per token), recorded experts (1 or 2 bytes each),
log-probs of a teacher (float32). Sizes are in the header.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict

from roll_async.schema import (
    ExpertRecord,
    FinishReason,
    Group,
    Image,
    Outcome,
    Prompt,
    Reward,
    RewardStatus,
    Sample,
    Turn,
)


def encode_group(group: Group) -> tuple[str, bytes]:
    """(header, block)."""
    prompt, samples = group.prompt, []
    parts = [prompt.token_ids.tobytes(), *(image.data for image in prompt.images)]
    for sample in group.samples:
        own_prompt = sample.prompt_token_ids != prompt.token_ids
        if own_prompt:
            parts.append(sample.prompt_token_ids.tobytes())
        parts += [sample.response_token_ids.tobytes(), sample.behaviour_logprobs.tobytes(), sample.loss_mask]
        samples.append(
            {
                "sample_id": sample.sample_id,
                "own_prompt_tokens": len(sample.prompt_token_ids) if own_prompt else None,
                "response_tokens": len(sample.response_token_ids),
                "version_runs": sample.version_runs,
                "finish_reason": sample.finish_reason.value,
                "generation_s": sample.generation_s,
                "reward": None if sample.reward is None else asdict(sample.reward),
                "num_turns": sample.num_turns,
                "experts": None if sample.experts is None else _shape_of(sample.experts),
                "trajectory": sample.trajectory,
                "turns": [asdict(turn) for turn in sample.turns],
                "outcome": None if sample.outcome is None else sample.outcome.value,
                "taught": sample.teacher_logprobs is not None,
            }
        )
        if sample.experts is not None:
            parts.append(sample.experts.ids.tobytes())
        if sample.teacher_logprobs is not None:
            parts.append(sample.teacher_logprobs.tobytes())
    header = {
        "group_id": group.group_id,
        "prompt": {
            "row_id": prompt.row_id,
            "num_tokens": len(prompt.token_ids),
            "domain": prompt.domain,
            "ground_truth": prompt.ground_truth,
            "text": prompt.text,
            "extra": dict(prompt.extra),
            "images": [[len(image.data), *image.grid] for image in prompt.images],
        },
        "samples": samples,
        "admitted_version": group.admitted_version,
        "admitted_s": group.admitted_s,
        "finished_s": group.finished_s,
        "baseline_score": group.baseline_score,
    }
    return json.dumps(header), b"".join(parts)


def _shape_of(record: ExpertRecord) -> dict[str, object]:
    return {
        "typecode": record.ids.typecode,
        "positions": record.num_positions,
        "num_layers": record.num_layers,
        "top_k": record.top_k,
    }


class _ArrayReader:
    """Reads arrays from a block, in order."""

    def __init__(self, block: bytes) -> None:
        self._block, self._position = block, 0

    def numbers(self, typecode: str, count: int) -> array:
        """[count] int32 ('i'), float32 ('f'), int16 ('h') or uint8 ('B')."""
        values = array(typecode)
        values.frombytes(self.raw(values.itemsize * count))
        return values

    def experts(self, shape: dict) -> ExpertRecord:
        """What `_shape_of` describes."""
        layers, top_k = shape["num_layers"], shape["top_k"]
        ids = self.numbers(shape["typecode"], shape["positions"] * layers * top_k)
        return ExpertRecord(ids=ids, num_layers=layers, top_k=top_k)

    def raw(self, size: int) -> bytes:
        part = self._block[self._position : self._position + size]
        if len(part) != size:  # a slice beyond the end is short, and raises nothing
            raise ValueError(f"block ends after {len(self._block)} bytes, {self._position + size} expected")
        self._position += size
        return part


def decode_group(header: str, block: bytes) -> Group:
    """Inverse of `encode_group`. Raises ValueError when the block is shorter than the header says."""
    fields, reader = json.loads(header), _ArrayReader(block)
    stored = fields["prompt"]
    prompt = Prompt(
        row_id=stored["row_id"],
        token_ids=reader.numbers("i", stored["num_tokens"]),
        domain=stored["domain"],
        ground_truth=stored["ground_truth"],
        text=stored["text"],
        extra=stored["extra"],
        images=tuple(
            Image(data=reader.raw(size), grid=(rows, columns)) for size, rows, columns in stored.get("images", ())
        ),
    )
    samples = []
    for item in fields["samples"]:
        own, size, reward = item["own_prompt_tokens"], item["response_tokens"], item["reward"]
        samples.append(
            Sample(
                sample_id=item["sample_id"],
                # One array for all samples, as it was when they were generated.
                prompt_token_ids=prompt.token_ids if own is None else reader.numbers("i", own),
                response_token_ids=reader.numbers("i", size),
                behaviour_logprobs=reader.numbers("f", size),
                loss_mask=reader.raw(size),
                version_runs=tuple((version, count) for version, count in item["version_runs"]),
                finish_reason=FinishReason(item["finish_reason"]),
                generation_s=item["generation_s"],
                reward=None if reward is None else Reward(**{**reward, "status": RewardStatus(reward["status"])}),
                num_turns=item["num_turns"],
                experts=None if item.get("experts") is None else reader.experts(item["experts"]),
                trajectory=item.get("trajectory", ""),
                turns=tuple(Turn(**turn) for turn in item.get("turns", ())),
                outcome=None if item.get("outcome") is None else Outcome(item["outcome"]),
                teacher_logprobs=reader.numbers("f", size) if item.get("taught") else None,
            )
        )
    return Group(
        group_id=fields["group_id"],
        prompt=prompt,
        samples=tuple(samples),
        admitted_version=fields["admitted_version"],
        admitted_s=fields["admitted_s"],
        finished_s=fields["finished_s"],
        baseline_score=fields["baseline_score"],
    )

"""Search in a local collection: BM25 over lines of JSON, in memory."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roll_async.agents.tools.toolbox import function

_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75  # the defaults of Lucene's BM25


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """`tool_args` of search."""

    file: str
    """JSON lines with `text`, and `title` if there is one."""
    num_results: int = 3
    max_characters: int = 500
    """Largest length of one result."""

    def __post_init__(self) -> None:
        if not Path(self.file).is_file():
            raise ValueError(f"file {self.file} does not exist")
        if self.num_results < 1 or self.max_characters < 1:
            raise ValueError("num_results and max_characters must be >= 1")


class Search:
    """`search(query)`: the best passages."""

    Options = SearchOptions
    schemas = (function("search", "Search passages of text.", {"query": {"type": "string"}}),)

    def __init__(self, options: SearchOptions) -> None:
        self._options = options
        text = Path(options.file).read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        self._texts = [": ".join(str(row[key]) for key in ("title", "text") if row.get(key)) for row in rows]
        lengths = [len(_words(text)) for text in self._texts]
        self._mean = max(1.0, sum(lengths) / max(1, len(lengths)))
        self._postings: dict[str, list[tuple[int, float]]] = {}
        for number, text in enumerate(self._texts):
            norm = _K1 * (1 - _B + _B * lengths[number] / self._mean)
            for word, count in Counter(_words(text)).items():
                self._postings.setdefault(word, []).append((number, count * (_K1 + 1) / (count + norm)))

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Raises ValueError for a call without a query."""
        query = arguments.get("query")
        if not isinstance(query, str):
            raise ValueError('the argument is {"query": string}')
        scores: Counter[int] = Counter()
        for word in set(_words(query)):
            found = self._postings.get(word, [])
            # Lucene's form: with the 1, a word of more than half of the passages has no negative weight.
            weight = math.log(1 + (len(self._texts) - len(found) + 0.5) / (len(found) + 0.5))
            for number, score in found:
                scores[number] += weight * score  # type: ignore[assignment]
        # Ties in the order of the file: the same query has the same result.
        best = sorted(scores, key=lambda n: (-scores[n], n))[: self._options.num_results]
        lines = [f"[{i + 1}] {self._texts[n][: self._options.max_characters]}" for i, n in enumerate(best)]
        return "\n".join(lines) or "nothing found"


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())

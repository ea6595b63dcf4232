"""Whether the first scored responses of a domain hold an answer at all. When none does, the prompt asks for another
form than the reward reads, every score is 0, and nothing else in a run would say so.
"""

from __future__ import annotations

from roll_async.observe.thoughts import Thought
from roll_async.rewards.answers import ANSWER_FORMATS, final_answer
from roll_async.schema import Reward, RewardStatus

NUM_FIRST = 16
UNFINISHED = "the thought never ends"
"""Why there is no answer."""
_SHOWN_CHARS = 200


class FirstAnswers:
    """Watches one domain until an answer was read or `NUM_FIRST` responses were scored."""

    def __init__(self, domain: str, answer_format: str, *, reads_answers: bool = True) -> None:
        self._domain, self._answer_format, self._reads_answers = domain, answer_format, reads_answers
        self._texts: list[Thought] = []
        self._done = False

    def look(self, text: Thought, reward: Reward) -> str:
        """The notice, once, when it is due; else nothing."""
        if self._done or reward.status is not RewardStatus.OK:
            return ""
        if reward.metrics.get("format", 1.0) > 0:
            self._done = True
        else:
            self._texts.append(text)
            self._done = len(self._texts) == NUM_FIRST
        if not self._done or len(self._texts) < NUM_FIRST:
            return ""
        notice = self._notice(reward.reason)
        self._texts.clear()
        return notice

    def _notice(self, reason: str) -> str:
        example = max((said.rest or said.thought for said in self._texts), key=len)
        shown = ("..." if len(example) > _SHOWN_CHARS else "") + example[-_SHOWN_CHARS:]
        problem = f"rewards.{self._domain}: the first {NUM_FIRST} scored responses hold no readable answer"
        num_unfinished = sum(said.unfinished for said in self._texts)
        if 2 * num_unfinished > NUM_FIRST:
            return (
                f"{problem}: {num_unfinished} end inside a thought. One ends in {shown!r}. Raise response_length, or "
                "have the chat template ask for no thought (docs_roll/rewards.md)"
            )
        if not self._reads_answers:
            return f"{problem} ({reason}). One ends in {shown!r}. Ask for its form in the prompt (docs_roll/rewards.md)"
        key = f"rewards.{self._domain}.answer_format"
        readable = {
            form: count
            for form in ANSWER_FORMATS
            if (count := sum(final_answer(said.rest, form) is not None for said in self._texts))
        }
        best = max(readable, key=lambda form: readable[form], default=None)
        remedy = (
            f"{key}: {best} would read {readable[best]} of them; set it, or ask for another form in the prompt"
            if best is not None
            else f"set {key} to the form they have, or ask for one of the forms in the prompt"
        )
        return (
            f"{problem} ({reason}; {key} is {self._answer_format}). One ends in {shown!r}. {remedy} "
            "(docs_roll/rewards.md)"
        )

"""Multiple choice and question answering: forms an answer takes, and what is not one."""

import json
import re

import pytest

from roll_async.rewards.multiple_choice import MultipleChoice
from roll_async.rewards.qa import ExactAnswer, QuestionAnswer, WordAnswer, overlap_f1, squad_words, words

CHOICES = json.dumps(["Paris", "London", "Rome", "Berlin"])


@pytest.mark.parametrize(
    "text",
    [
        r"so \boxed{B}",
        r"\boxed{(B)}",
        r"\boxed{\text{B}}",
        r"\boxed{\textbf{(B)}}",
        "Answer: B",
        "Answer: B. London",
        "**Answer:** (B) because",
        "A is wrong.\nThe correct answer is B.",
        "the answer is **B**",
        "I think\n\nB",
        "so\n(B)",
        "B) London",
        r"\boxed{London}",
        "<think>the answer is C</think> The answer is B",
        "<answer>b</answer>",
    ],
)
def test_the_right_letter_is_right_in_every_usual_form(text):
    verdict = MultipleChoice()(text, "B", {"choices": CHOICES})
    assert (verdict.score, verdict.acc, verdict.format, verdict.reason) == (1, 1, 1, "")


@pytest.mark.parametrize(
    ("text", "score", "form"),
    [
        ("Answer: C", 0, 1),
        (r"\boxed{A, B}", 0, 1),
        (r"\boxed{AB}", 0, 1),
        ("Because it is a capital.", 0, 0),
        ("A man went to the shop", 0, 0),
        ("", 0, 0),
        ("I say the answer is a", 0, 0),
        (r"\boxed{E}", 0, 0),
        (r"\boxed{Between}", 0, 0),
        ("the answer is B</think>", 0, 0),
    ],
)
def test_another_letter_or_none_is_wrong(text, score, form):
    verdict = MultipleChoice()(text, "B", {"choices": CHOICES})
    assert (verdict.score, verdict.format) == (score, form) and verdict.reason


@pytest.mark.parametrize("form", ["Answer: %s", r"\boxed{%s}", "the answer is %s", "So the answer: %s"])
def test_a_letter_that_is_a_word_of_a_sentence_is_none(form):
    for said in ("I don't know", "I\u2019d say none", "A lot of them", "I think so", "I'm not sure"):
        for reference in "AI":
            assert MultipleChoice()(form % said, reference, {}).score == 0, said
    for said in (
        "A because of it",
        "A since it is",
        "A is right",
        "A.",
        "**A** cat",
        "A Paris",
        "A, a town",
        "A as told",
        "A\nthat was easy",
        *(f"A {word} it" for word in "based given by after among according if in here then only while".split()),
    ):
        assert MultipleChoice()(form % said, "A", {}).score == 1, said
    for choice in ("paris", "little water", "London"):
        choices = {"choices": json.dumps([choice, "few"])}
        assert MultipleChoice()(form % f"A {choice}", f"A {choice}", choices).score == 1, choice


def test_the_i_of_a_sentence_behind_the_answer_is_none():
    said = "The correct choice is B. After some thought that is the option I chose."
    assert MultipleChoice()(said, "B", {}).score == 1


WRAPPERS = re.split(
    "  |\n",
    r"""\boxed{B}  \fbox{B}  \framebox{B}  \text{B}  \mathrm{B}  \textbf{B}  \mathbf{B}  $B$  \(B\)  \[B\]  \text{(B)}
\textbf{(B)}  \left(B\right)  \left(\text{B}\right)  (\mathrm{B})  \textbf{(B)}\ \text{London}
\textbf{(B)}~London  \textbf{B)}  \text{B.}  \text{B}.  \mbox{B}  \emph{B}  \textit{B}  \mathsf{B}  \underline{B}
\operatorname{B}  {B}  {\bf B}  \rm{B}  \text{Option B}  \text{ B }  \,B\,  \quad B  [B]  \text{\textbf{B}}
\textbf{B: London}  B \text{ (London)}  \textcolor{blue}{B}  \color{red}{B}  "B"  'B'  **B**  `B`  <b>B</b>  B!
B,  B;  b  (b)  \text{b}  \text{(b)}  Option B  \text{Answer: B}  B - London  B: \text{London}""",
)


@pytest.mark.parametrize("form", [r"so \boxed{%s}", "Answer: %s", "<answer>%s</answer>"])
def test_a_letter_is_read_in_every_wrapper_of_latex_and_markdown(form):
    for extra in ({}, {"choices": CHOICES}):
        assert [w for w in WRAPPERS if MultipleChoice()(form % w, "B", extra).score != 1] == []
        assert [w for w in WRAPPERS if MultipleChoice()(form % w, "C", extra).score != 0] == []
    assert len(WRAPPERS) > 50


@pytest.mark.parametrize("form", [r"so \boxed{%s}", "Answer: %s", "the answer is %s", "<answer>%s</answer>"])
def test_one_of_two_letters_is_no_answer(form):
    for two in (
        "A or B", "B or A", "(A) or (B)", r"\text{A or B}", r"\text{A} \text{ or } \text{B}", "$A$ or $B$", "A, or B",
        r"\textbf{(A)} or \textbf{(B)}", "A|B", r"A \lor B", r"A \vee B", r"\text{A} \mid \text{B}", "A B", "(A)(B)",
        "A vs B",
        r"A \to B", "A or maybe B", "A, B", "A and B", "A/B", "AB", r"\mathrm{AB}", r"\text{A}\text{B}", r"A \& B",
    ):  # fmt: skip
        for reference in "AB":
            assert MultipleChoice()(form % two, reference, {"choices": CHOICES}).score == 0, two
    assert MultipleChoice()(r"\boxed{A} or \boxed{B}", "A", {}).score == 0
    assert MultipleChoice()("Answer: A is wrong, B is right", "A", {}).score == 0


@pytest.mark.parametrize(
    "text", [r"\boxed{A,C}", r"\boxed{C, A}", "Answer: A and C", r"\boxed{AC}", "Answer: (A), (C)"]
)
def test_several_letters_are_a_set(text):
    assert MultipleChoice()(text, "A,C", {}).score == 1
    assert MultipleChoice()(text, "A", {}).score == 0 and MultipleChoice()(text, "A,B,C", {}).score == 0


@pytest.mark.parametrize(
    ("truth", "choices"),
    [
        ("London", CHOICES),
        ("B", json.dumps({"A": "Paris", "B": "London"})),
        ("(B)", json.dumps({"text": ["Paris", "London"], "label": ["A", "B"]})),
        ("B", json.dumps({"text": ["Paris", "London"]})),
    ],
)
def test_choices_and_references_come_in_several_forms(truth, choices):
    assert MultipleChoice()("Answer: london", truth, {"choices": choices}).score == 1


def test_a_reference_without_a_letter_is_an_error_of_the_row_and_not_a_wrong_answer():
    with pytest.raises(ValueError, match="names no letter"):
        MultipleChoice()("Answer: B", "nothing", {})


@pytest.mark.parametrize(
    ("text", "f1", "em", "form"),
    [
        ("Answer: The Eiffel Tower", 1, 1, 1),
        ("<answer>eiffel tower!</answer>", 1, 1, 1),
        (r"\boxed{Tower}", 2 / 3, 0, 1),
        ("Answer: the big Eiffel tower in Paris", 4 / 7, 0, 1),
        ("Eiffel Tower", 1, 1, 0),
        ("Answer: Louvre", 0, 0, 1),
        ("", 0, 0, 0),
        ("<think>Eiffel Tower</think>", 0, 0, 0),
    ],
)
def test_a_short_answer_is_scored_by_its_words(text, f1, em, form):
    verdict = QuestionAnswer()(text, "Eiffel Tower", {})
    assert verdict.score == verdict.metrics["f1"] == pytest.approx(f1)
    assert (verdict.acc, verdict.metrics["em"], verdict.format) == (em, em, form)
    assert ExactAnswer()(text, "Eiffel Tower", {}).score == em


@pytest.mark.parametrize(
    ("text", "squad", "ours"),
    [
        ("The Eiffel-Tower!", ["eiffeltower"], ["eiffel", "tower"]),
        ("state of the art", ["state", "of", "art"], ["state", "of", "art"]),
        ("don't", ["dont"], ["dont"]),
        ("A.B. \u2014 an 'x'", ["ab", "\u2014", "x"], ["b", "x"]),
        ("\uff21 caf\u00e9_1", ["\uff41", "caf\u00e91"], ["caf\u00e9", "1"]),
        ("the", [], []),
        ("\u4e2d\u56fd", ["\u4e2d\u56fd"], ["\u4e2d", "\u56fd"]),
        ("anthem", ["anthem"], ["anthem"]),
    ],
)
def test_squads_normalisation_is_squads_and_ours_is_ours(text, squad, ours):
    assert squad_words(text) == squad and words(text) == ours


def test_the_reward_named_after_squad_uses_its_normalisation():
    assert QuestionAnswer()("Answer: Eiffel Tower", "Eiffel-Tower", {}).score == 0
    assert WordAnswer()("Answer: Eiffel Tower", "Eiffel-Tower", {}).score == 1
    assert QuestionAnswer()("Answer: EiffelTower", "Eiffel-Tower", {}).score == 1


def test_the_best_of_several_references_counts():
    truth = json.dumps(["George Washington", "Washington", 1789])
    assert QuestionAnswer()("Answer: washington", truth, {}).acc == 1
    assert QuestionAnswer()("Answer: 1789", truth, {}).acc == 1
    assert QuestionAnswer()("Answer: [sic]", "[sic]", {}).acc == 1


def test_words_of_other_scripts_are_words():
    assert words("\u4e2d\u56fd\u3002") == ["\u4e2d", "\u56fd"] and words("na\u00efve CAF\u00c9") == [
        "na\u00efve",
        "caf\u00e9",
    ]
    assert words("\uff21\uff11") == ["a1"] and words("don't") == ["dont"]


def test_f1_agrees_with_its_definition_on_all_small_multisets():
    import itertools

    for answer, reference in itertools.product(itertools.product("ab", repeat=3), itertools.product("abc", repeat=2)):
        left = list(reference)
        common = sum(1 for w in answer if w in left and left.remove(w) is None)
        precision, recall = common / 3, common / 2
        expected = 2 * precision * recall / (precision + recall) if common else 0.0
        assert overlap_f1(list(answer), list(reference)) == pytest.approx(expected)


@pytest.mark.parametrize("reward", [QuestionAnswer, ExactAnswer, WordAnswer])
def test_a_stated_answer_is_read_without_the_commands_of_latex_around_it(reward):
    for said in (
        r"\boxed{\text{New York}}", r"\boxed{\textbf{\text{New} \mathrm{York}}}", r"Answer: $\text{New}~\text{York}$",
        r"<answer>\mbox{New\ York}</answer>", r"\boxed{\operatorname {New}\,York}", r"so \boxed{\text{New\;York.}}",
    ):  # fmt: skip
        verdict = reward()(said, "New York", {})
        assert (verdict.score, verdict.acc) == (1, 1), said
    assert reward()("Answer: context", "context", {}).score == 1
    for same in ("foo~bar", "3~4 days", r"\text{Paris}", r"\mathrm{NaCl}", r"C:\textures{a}", "~/.bashrc"):
        assert reward()(f"Answer: {same}", same, {}).acc == reward()(same, same, {}).acc == 1, same
    assert reward()("Answer: Paris", r"\text{Paris}", {}).acc == 1
    assert reward()(r"\boxed{\text{New\!York}}", "NewYork", {}).acc == 1
    assert reward()(r"\boxed{\text{about }3~4}", "about 3~4", {}).acc == 1

"""Every constraint kind: a text that keeps it and one that just does not."""

import json
import time

import pytest

from roll_async.rewards.constraints import CONSTRAINTS
from roll_async.rewards.ifeval import InstructionFollowing, StrictInstructionFollowing, parse_constraints
from roll_async.rewards.ifeval_readings import READINGS, count_sentences
from tests.patience import patient

CASES = {
    "keywords:existence": ({"keywords": ["sea", "Ship"]}, "The SEA carries a ship.", "The seas carry a ship."),
    "keywords:frequency": ({"keyword": "sea", "frequency": 2, "relation": "at least"}, "sea, sea", "sea seas"),
    "keywords:forbidden_words": ({"forbidden_words": ["cat"]}, "concatenate", "a Cat!"),
    "keywords:letter_frequency": ({"letter": "e", "let_frequency": 3, "let_relation": "less than"}, "Eel", "eel e"),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "at least"},
        'He said "go." Then 3.14 was it!',
        "Version 1.2.3 of it.",
    ),
    "length_constraints:number_words": ({"num_words": 4, "relation": "less than"}, "don't stop now", "do not stop now"),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "a\n\n**Then** b",
        "a\n\nb then",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] of [town]", "[name] of []"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "text\nP. S. more", "text P.S. more"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n- b\n* c"),
    "detectable_format:constrained_response": ({}, "My answer is maybe.", "My answer is perhaps."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\nx\nSection 2\ny",
        "Section 1\nx\nSection two",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
    "detectable_format:title": ({}, "<<A day>>\ntext", "<< >> <A day>"),
    "combination:two_responses": ({}, "one\n******\ntwo", "one\n******\none"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it."}, "say it. Yes", "I say it."),
    "startend:end_checker": ({"end_phrase": "Any questions?"}, "Done. any questions?", "Any questions? No."),
    "startend:quotation": ({}, '"all of it"', '"part" of it'),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NASA and USA",
        "NASA and Usa",
    ),
    "change_case:english_capital": ({}, "ALL, 3!", "ALL but One"),
    "change_case:english_lowercase": ({}, "all, 3!", "all but One"),
    "punctuation:no_comma": ({}, "one. two", "one, two"),
    "language:response_language": (
        {"language": "de"},
        "Das Wetter war heute sch\u00f6n und wir gingen in den Park.",
        "The weather was nice today and we went to the park.",
    ),
}


def test_every_kind_has_a_case():
    assert CASES.keys() == CONSTRAINTS.keys() and len(CASES) == 25


@pytest.mark.parametrize("kind", CASES)
def test_a_constraint_is_kept_by_one_text_and_broken_by_its_neighbour(kind):
    if kind.startswith("language"):
        pytest.importorskip("py3langid")
    arguments, good, bad = CASES[kind]
    truth = json.dumps({"kind": kind, **arguments})
    kept, broken = (StrictInstructionFollowing()(text, truth, {}) for text in (good, bad))
    assert (kept.score, kept.acc, kept.reason) == (1, 1, "")
    assert (broken.score, broken.acc) == (0, 0) and kind in broken.reason


@pytest.mark.parametrize(
    ("relation", "counts"),
    [("at least", [2, 3]), ("less than", [0, 1]), ("at most", [0, 1, 2]), ("more than", [3]), ("exactly", [2])],
)
def test_relations_mean_what_they_say(relation, counts):
    truth = json.dumps({"kind": "keywords:frequency", "keyword": "x", "frequency": 2, "relation": relation})
    assert [n for n in range(4) if InstructionFollowing()("x " * n + "y", truth, {}).acc] == counts


IFEVAL = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None}, {"num_words": 3, "relation": "at least", "keyword": None}],
}
FORMS = [
    (json.dumps(IFEVAL), {}),
    (repr([{"instruction_id": IFEVAL["instruction_id_list"], "kwargs": IFEVAL["kwargs"]}]), {}),
    ("", {"instruction_id_list": json.dumps(IFEVAL["instruction_id_list"]), "kwargs": json.dumps(IFEVAL["kwargs"])}),
    (json.dumps([{"kind": "punctuation:no_comma"}, {"kind": "length_constraints:number_words", "num_words": 3}]), {}),
]


@pytest.mark.parametrize(("truth", "extra"), FORMS)
def test_the_score_is_the_share_and_acc_is_all_in_every_form_of_reference(truth, extra):
    verdicts = [InstructionFollowing()(t, truth, extra) for t in ("one two three", "one, two three", "one, two", "")]
    assert [(v.score, v.acc) for v in verdicts] == [(1, 1), (0.5, 0), (0, 0), (0, 0)]
    assert verdicts[0].metrics == {"constraints": 2} and verdicts[3].format == 0


def test_only_what_follows_the_thinking_is_looked_at():
    truth = json.dumps({"kind": "punctuation:no_comma"})
    assert InstructionFollowing()("<think>a, b</think>c", truth, {}).acc == 1


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ('{"kind": "language:accent", "language": "de"}', "'language:accent' is not one of"),
        ('{"kind": "keywords:frequency", "keyword": "x"}', "needs frequency"),
        ('{"kind": "keywords:frequency", "keyword": "x", "frequency": 1, "relation": "about"}', "'about'"),
        ('{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}', "1 constraints and 2 kwargs"),
        ("[]", "no constraints"),
        ("42", "no constraints"),
        (
            '{"kind": "keywords:frequency", "keyword": "x", "frequency": "2"}',
            "frequency must be a whole number, got '2'",
        ),
        ('{"kind": "length_constraints:number_words", "num_words": 2.5}', "num_words must be a whole number, got 2.5"),
        ('{"kind": "length_constraints:number_words", "num_words": true}', "num_words must be a whole number"),
        ('{"kind": "keywords:frequency", "keyword": 7, "frequency": 2}', "keyword must be a text, got 7"),
        ('{"kind": "keywords:existence", "keywords": "sea"}', "keywords must be a list of texts, got 'sea'"),
        ('{"kind": "keywords:existence", "keywords": ["sea", 1]}', "keywords must be a list of texts"),
        ('{"kind": "change_case:capital_word_frequency", "capital_frequency": 1, "capital_relation": "x"}', "'x'"),
        ('{"kind": "language:response_language", "language": "tlh"}', "language 'tlh' is not one of af ar"),
        ('{"kind": ["punctuation:no_comma"]}', "is not one of"),
        ('{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [[1]]}', "must be an object, got list"),
        ('{"instruction_id_list": ["punctuation:no_comma"], "kwargs": 7}', "kwargs must be a list, got int"),
        ("[" * 100_000, "neither JSON nor"),
        ("{[]: 1}", "neither JSON nor"),
    ],
)
def test_a_row_that_cannot_be_checked_is_an_error_when_it_is_loaded(truth, message):
    with pytest.raises(ValueError, match=message):
        parse_constraints(truth, {})


def test_a_whole_number_may_come_from_a_column_with_nulls():
    truth = json.dumps({"kind": "length_constraints:number_words", "num_words": 2.0, "relation": None})
    assert parse_constraints(truth, {})[0].arguments == {"num_words": 2}


@pytest.mark.parametrize(
    "text", ["[" * 200_000, "*" * 200_000, ". " * 100_000, "<" * 200_000, " " * 200_000 + "x", "{" * 200_000]
)
def test_checking_is_linear_in_whatever_the_model_wrote(text):
    pytest.importorskip("py3langid")
    truth = json.dumps([{"kind": kind, **arguments} for kind, (arguments, _, _) in CASES.items()])
    started = time.process_time()
    StrictInstructionFollowing()(text, truth, {})
    InstructionFollowing()(text, truth, {})
    assert time.process_time() - started < patient(4.0)


@pytest.mark.parametrize(
    ("kind", "arguments", "text", "theirs", "strict"),
    [
        ("keywords:existence", {"keywords": ["sea"]}, "the seas", 1, 0),
        ("keywords:frequency", {"keyword": "sea", "frequency": 2}, "sea seas", 1, 0),
        ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "a Cat!", 0, 0),
        ("length_constraints:number_words", {"num_words": 4, "relation": "less than"}, "don't stop now", 0, 1),
        ("length_constraints:number_sentences", {"num_sentences": 1, "relation": "exactly"}, "Dr. Who came.", 1, 0),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", 1, 1),
        ("length_constraints:nth_paragraph_first_word",
         {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"}, "a\n\n**Then** b", 0, 1),
        ("detectable_content:number_placeholders", {"num_placeholders": 1}, "an empty []", 1, 0),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "text P.S. more", 1, 0),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n-b", 1, 0),
        ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "* a\n---", 0, 1),
        ("detectable_format:constrained_response", {}, "my answer is yes.", 0, 1),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", 1, 1),
        ("detectable_format:multiple_sections", {"section_spliter": "Part", "num_sections": 1}, "Part1", 1, 1),
        ("detectable_format:json_format", {}, "```json\n{}\n```", 1, 1),
        ("detectable_format:title", {}, "<<a <b> c>>", 1, 0),
        ("change_case:capital_word_frequency", {"capital_frequency": 2}, "A-B c", 0, 1),
        ("change_case:english_capital", {}, "O TEMPO ESTAVA BOM HOJE E FOMOS AO PARQUE", 0, 1),
        ("change_case:english_lowercase", {}, "o tempo estava bom hoje e fomos ao parque", 0, 1),
        ("punctuation:no_comma", {}, "one\uff0c two", 1, 0),
    ],
)  # fmt: skip
def test_ifeval_reads_a_constraint_as_ifeval_does_and_ifeval_strict_as_it_is_written(
    kind, arguments, text, theirs, strict
):
    if kind.startswith("change_case:english"):
        pytest.importorskip("py3langid")
    truth = json.dumps({"kind": kind, **arguments})
    verdicts = (InstructionFollowing()(text, truth, {}), StrictInstructionFollowing()(text, truth, {}))
    assert [v.acc for v in verdicts] == [theirs, strict]


def test_both_readings_know_every_kind():
    assert READINGS.keys() == CONSTRAINTS.keys()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("Mr. Smith met Dr. J. Brown at 3 p.m. today.", 1),
        ("It costs 3.50 dollars. Really?!", 2),
        ("Wait... what? No.", 2),
        ('He said "go." Then he left', 2),
        ("a line\nanother line", 1),
        ("1. First\n2. Second", 3),
        ("", 0),
    ],
)
def test_sentences_are_counted_with_abbreviations_in_mind(text, count):
    assert count_sentences(text) == count


SENTENCES = {
    "en": "ALL THE WEATHER WAS NICE TODAY",
    "pt": "O tempo estava bom hoje e fomos ao parque com os nossos cachorros.",
    "es": "El tiempo era bueno hoy y fuimos al parque con nuestros dos perros.",
    "it": "Oggi il tempo era bello e siamo andati al parco con i nostri due cani.",
    "sw": "Leo hali ya hewa ilikuwa nzuri na tulikwenda kwenye bustani na mbwa wetu.",
    "zh-cn": "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u5e26\u7740\u72d7\u53bb\u4e86\u516c\u56ed\u3002",
    "uk": "\u0421\u044c\u043e\u0433\u043e\u0434\u043d\u0456 \u0431\u0443\u043b\u0430 \u0433\u0430\u0440\u043d\u0430"
    " \u043f\u043e\u0433\u043e\u0434\u0430",
    "iw": "\u05de\u05d6\u05d2 \u05d4\u05d0\u05d5\u05d5\u05d9\u05e8 \u05d4\u05d9\u05d4 \u05e0\u05e2\u05d9\u05dd",
}


def test_a_text_keeps_the_constraint_of_its_own_language_only():
    pytest.importorskip("py3langid")
    for written, text in SENTENCES.items():
        kept = [
            code
            for code in SENTENCES
            if InstructionFollowing()(
                text, json.dumps({"kind": "language:response_language", "language": code}), {}
            ).acc
        ]
        assert kept == [written]


def test_a_language_that_cannot_be_told_is_an_error_of_the_row_and_not_a_broken_constraint():
    pytest.importorskip("py3langid")
    with pytest.raises(ValueError, match="language 'tlh' is not one of af ar"):
        InstructionFollowing()("nuqneH", json.dumps({"kind": "language:response_language", "language": "tlh"}), {})

"""A question of VCR as four texts: names, segments, which words name which box, cuts and controls."""

from __future__ import annotations

import json

import numpy as np
import pytest

from e2e_vl.data.config import VCROptions
from e2e_vl.parts import decode
from e2e_vl.tasks.config import NEUTRAL_NAMES, VCRConfig
from e2e_vl.tasks.vcr import VCRTask
from e2e_vl.text import TextTokenizer
from tests.data.tiny_vcr import TinyVCR
from tests.tasks.preprocessors import photo, tokens, word
from tests.tasks.preprocessors import spoken as spoken_by

READER = set(VCROptions.__struct_fields__)


@pytest.fixture
def tiny(tmp_path) -> TinyVCR:
    return TinyVCR(tmp_path)


def texts_of(tiny, texts=(0,), *, blank=False, training=False, flipped=False, epoch=0, **options):
    """Text examples of some questions; `options` are the reader's and the task's."""
    reader = {name: value for name, value in options.items() if name in READER}
    config = VCRConfig(**{name: value for name, value in options.items() if name not in READER})
    preprocessor = VCRTask(8, config).preprocessor(TextTokenizer(tiny.tokenizer, is_blank=blank, training=training))
    return word(preprocessor, tiny.dataset(**reader).sample(texts), photo(flipped=flipped), epoch=epoch)


def spoken(tiny, text) -> str:
    return spoken_by(text, tiny.tokenizer)


def test_four_texts_of_a_question(tiny):
    texts = texts_of(tiny)
    assert len(texts) == 4
    first = texts[0]
    assert spoken(tiny, first) == "[CLS] why is riley and chair there ? [SEP] no casey . [SEP]"
    assert first.encoding.token_type_ids.tolist() == [0] * 9 + [1] * 4
    assert first.encoding.summary is None
    assert first.region_of_token.tolist() == [-1, -1, -1, 1, -1, 2, -1, -1, -1, -1, 0, -1, -1]
    assert tokens(texts[2], tiny.tokenizer)[9:] == ["riley", "'", "s", "chair", ".", "[SEP]"]
    assert texts[2].region_of_token[9:].tolist() == [1, -1, -1, -1, -1, -1]
    assert [float(text.targets.is_right) for text in texts] == [0, 0, 1, 0]
    assert {text.image_index for text in texts} == {(0,)}


def test_words_may_name_no_region(tiny):
    assert all(text.region_of_token is None for text in texts_of(tiny, ground_words=False))


def test_question_and_right_answer_stand_before_a_rationale(tiny):
    texts = texts_of(tiny, question="rationale")
    said = spoken(tiny, texts[1])
    assert said == "[CLS] why is riley and chair there ? riley ' s chair . [SEP] jessie is . [SEP]"
    assert texts[1].encoding.token_type_ids.tolist() == [0] * 14 + [1] * 4
    assert [float(text.targets.is_right) for text in texts] == [0, 1, 0, 0]
    assert (texts[0].record["label"], texts[0].record["conditioned_on"]) == (1, 2)


def test_rationales_given_each_answer(tiny):
    texts = texts_of(tiny, (1, 8), question="rationale", condition_on="each")
    assert len(texts) == 8
    assert [text.record["text_index"] for text in texts] == [1] * 4 + [8] * 4
    assert {(text.record["annot_id"], text.record["conditioned_on"]) for text in texts} == {("val-0", 1), ("val-2", 0)}
    assert spoken(tiny, texts[0]).startswith("[CLS] why is riley and chair there ? yes . [SEP]")
    assert all(text.targets.is_right is None for text in texts)


def test_a_mirrored_image_changes_no_words(tiny):
    tiny.lines[0]["question"][3] = "left"
    for one, other in zip(texts_of(tiny), texts_of(tiny, flipped=True), strict=True):
        np.testing.assert_array_equal(one.encoding.input_ids, other.encoding.input_ids)
        assert other.record["flipped"] is True


def test_names_and_rows_of_some_of_the_objects(tiny):
    first = texts_of(tiny, objects="mentioned")[0]
    assert spoken(tiny, first) == "[CLS] why is casey and chair there ? [SEP] no riley . [SEP]"
    assert first.region_of_token[[3, 5, 10]].tolist() == [0, 1, 2]
    first = texts_of(tiny, objects="r2c", join_word=None)[0]
    assert spoken(tiny, first).startswith("[CLS] why is riley chair there ? [SEP]")


def test_people_are_named_in_turn_and_in_training_from_anywhere(tiny):
    seen = {spoken(tiny, texts_of(tiny, training=True, epoch=epoch)[0]) for epoch in range(20)}
    assert len(seen) > 5
    assert len({spoken(tiny, texts_of(tiny, epoch=epoch)[0]) for epoch in range(5)}) == 1
    fixed = texts_of(tiny, training=True, turn_names=False, epoch=3)[0]
    assert tokens(fixed, tiny.tokenizer)[3] == "riley"
    own = texts_of(tiny, people_names=("Quinn", "Pat"))[0]
    assert spoken(tiny, own).startswith("[CLS] why is pat and chair there")


def test_a_name_does_not_depend_on_the_other_questions(tiny):
    alone, together = (texts_of(tiny, texts, training=True, epoch=1) for texts in ((2,), (0, 2)))
    for one, other in zip(alone, together[4:], strict=True):
        np.testing.assert_array_equal(one.encoding.input_ids, other.encoding.input_ids)


def test_texts_are_cut_without_special_tokens(tiny):
    assert max(len(text.encoding.input_ids) for text in texts_of(tiny, max_pieces=6)) == 6 + 3
    with pytest.raises(ValueError, match=r"set task\.config\.max_pieces instead"):
        VCRTask(8).preprocessor(TextTokenizer(tiny.write().tokenizer, max_length=20))


def test_controls_without_words(tiny):
    assert [tokens(text, tiny.tokenizer) for text in texts_of(tiny, blank=True)] == [["[CLS]", "[SEP]", "[SEP]"]] * 4
    answers = texts_of(tiny, blank_question=True)
    assert tokens(answers[1], tiny.tokenizer) == ["[CLS]", "[SEP]", "yes", ".", "[SEP]"]


def test_records_are_plain(tiny):
    tiny.lines[0]["family"] = "colour"
    record = texts_of(tiny)[3].record
    assert record == json.loads(json.dumps(record))
    assert (record["text_index"], record["annot_id"], record["kind"], record["label"]) == (0, "val-0", "answer", 2)
    assert record["sent"] == "Why is Riley and chair there ?"
    assert record["choices"][0] == "No Casey ."
    assert record["named_boxes"][1:3] == [["Riley", [30, 0, 50, 59]], ["chair", [60, 30, 95, 59]]]
    assert record["family"] == "colour"
    assert "objects" not in record, "only a user's own question repeats them"


def test_the_test_split_has_no_targets(tiny):
    for line in tiny.lines:
        del line["answer_label"], line["rationale_label"]
    assert [text.targets.is_right for text in texts_of(tiny)] == [None] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_pieces": 1}, "need at least 2"),
        ({"mask_size": 0}, "side of the detector's RoI maps"),
        ({"people_names": []}, "needs at least one name"),
        ({"max_pieces": "many"}, r"task\.config\.max_pieces is 'many'; it must be a int"),
        ({"ground_words": "maybe"}, r"task\.config\.ground_words is 'maybe'; it must be a bool"),
        ({"people_names": "Casey"}, r"task\.config\.people_names is 'Casey'; it must be a list"),
        ({"max_pieces": None}, r"task\.config\.max_pieces is None"),
        ({"ground_at": "start"}, r"task\.config\.ground_at is 'start'; it must be one of pieces, word_number"),
        ({"names_by": "turn"}, r"task\.config\.names_by is 'turn'"),
        ({"names_restart_in_choices": True}, r"needs the order of mention, but task\.config\.names_by is 'box'"),
        ({"cut": "front"}, r"task\.config\.cut is 'front'"),
        ({"cut_choices_only": True}, r"needs texts that are cut at their fronts, but task\.config\.cut is 'longer'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        decode(options, VCRConfig, "task.config")


def test_options_that_may_be_left_open():
    config = decode({"mask_size": None, "join_word": None}, VCRConfig, "task.config")
    assert config == VCRConfig(mask_size=None, join_word=None)


def test_words_that_a_vocabulary_needs_beside_those_of_the_data():
    words = list(VCRTask.own_words(VCRConfig()))
    assert set(NEUTRAL_NAMES) <= set(words) and "and" in words


def test_names_by_mention(tiny):
    """In the question [1] comes first; in the choices the turn goes on, in each of them from the same name."""
    tiny.lines[0]["answer_choices"][1] = [[3, 0], "and", [1], [2], "."]
    texts = texts_of(tiny, names_by="mention", join_word=None, training=True, epoch=5)
    assert spoken(tiny, texts[0]) == "[CLS] why is casey chair there ? [SEP] no riley . [SEP]"
    assert spoken(tiny, texts[1]).endswith("[SEP] riley jessie and casey chair . [SEP]")
    assert texts[1].record["choices"][:2] == ["No Riley .", "Riley Jessie and Casey chair ."]


def test_names_that_restart_in_choices(tiny):
    """The turn begins anew there, so [0] has the same name as [1] of the question."""
    tiny.lines[0]["answer_choices"][1] = [[3, 0], "and", [1], [2], "."]
    settings = {"names_by": "mention", "names_restart_in_choices": True, "join_word": None}
    texts = texts_of(tiny, **settings, training=True, epoch=5)
    assert spoken(tiny, texts[0]) == "[CLS] why is casey chair there ? [SEP] no casey . [SEP]"
    assert spoken(tiny, texts[1]).endswith("[SEP] casey riley and casey chair . [SEP]")
    assert texts[1].region_of_token[[3, 4, 8, 9, 11, 12]].tolist() == [1, 2, 3, 0, 1, 2]
    record = texts[0].record
    assert record["choices"][:2] == ["No Casey .", "Casey Riley and Casey chair ."]
    assert record["named_boxes"][1][0] == "Casey"


def test_a_given_answer_goes_on_with_the_names(tiny):
    tiny.lines[0]["answer_choices"][2] = [[3], "'", "s", "chair", "."]
    texts = texts_of(tiny, question="rationale", names_by="mention")
    assert spoken(tiny, texts[1]).startswith("[CLS] why is casey and chair there ? riley ' s chair . [SEP] riley is")


def test_one_place_per_named_object_counted_before_wordpieces(tiny):
    """ "chair's" is three wordpieces of one word, so what follows it is marked too early."""
    tiny.lines[0]["question"] = ["Why", "chair's", [1], "there", "?"]
    tiny.lines[0]["answer_choices"][0] = ["No", "chair's", [0, 2], "."]
    first = texts_of(tiny, ground_at="word_number", join_word=None)[0]
    assert spoken(tiny, first) == "[CLS] why chair ' s riley there ? [SEP] no chair ' s casey chair . [SEP]"
    named = {position: row for position, row in enumerate(first.region_of_token.tolist()) if row >= 0}
    # [CLS] is 0 and the second text begins at 9
    assert named == {1 + 2: 1, 9 + 2: 0, 9 + 3: 2}


def test_word_numbers_go_on_over_question_and_answer(tiny):
    tiny.lines[0]["answer_choices"][2] = ["chair's", [3], "."]
    first = texts_of(tiny, question="rationale", ground_at="word_number")[0]
    assert spoken(tiny, first) == "[CLS] why is riley and chair there ? chair ' s jessie . [SEP] so . [SEP]"
    named = {position: row for position, row in enumerate(first.region_of_token.tolist()) if row >= 0}
    assert named == {3: 1, 5: 2, 9: 3}  # the answer's own words are number 7 and 8


def test_only_the_choice_is_cut(tiny):
    texts = texts_of(tiny, cut="fronts", cut_choices_only=True, max_pieces=9)
    assert spoken(tiny, texts[0]) == "[CLS] why is riley and chair there ? [SEP] casey . [SEP]"
    assert spoken(tiny, texts[2]) == "[CLS] why is riley and chair there ? [SEP] chair . [SEP]"
    with pytest.raises(ValueError, match="The 7 wordpieces in front of the choices are more than the limit, 6"):
        texts_of(tiny, cut="fronts", cut_choices_only=True, max_pieces=6)


def test_question_and_choice_lose_their_fronts(tiny):
    """A question of 7 words loses none, one of 38 loses half of what is too much, each for its own choice."""
    texts = texts_of(tiny, cut="fronts", max_pieces=9)
    assert spoken(tiny, texts[0]) == "[CLS] why is riley and chair there ? [SEP] casey . [SEP]"
    tiny.lines[0]["question"] = ["so"] * 6 + [[1]] + ["why"] * 31
    texts = texts_of(tiny, cut="fronts", max_pieces=37)
    cut, short = (tokens(text, tiny.tokenizer) for text in texts[:2])
    assert cut == ["[CLS]", *["so"] * 4, "riley", *["why"] * 31, "[SEP]", ".", "[SEP]"]  # of 41 pieces 4, two of each
    assert texts[0].region_of_token.tolist() == [-1] * 5 + [1] + [-1] * 34
    assert short == ["[CLS]", *["so"] * 4, "riley", *["why"] * 31, "[SEP]", ".", "[SEP]"]  # of 40 pieces 3: 2 and 1
    assert texts[0].record["sent"].split() == ["so"] * 6 + ["Riley"] + ["why"] * 31

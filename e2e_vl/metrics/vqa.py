"""VQA v2: answer normalisation, accuracy, soft targets, and the spelling of vocabulary answers.

The rules follow the official evaluation script, including its bugs (they affect the published numbers), and BAN's tool
for answer vocabularies. Both are tested with golden data.

Predicted and human answers go through `clean_answer` and, unless all human answers are the same string, through
`strip_punctuation` and `standardise_words`. An answer's score depends on how many people gave it (`answer_accuracy`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from e2e_vl.io import Id, Score
from e2e_vl.predictions import Prediction, Ranked, write_list

UNKNOWN = "<unk>"  # an entry of some vocabularies, which always scores 0

_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile("[0-9],[0-9]")
_LOOSE_PERIOD = re.compile(r"\.(?![0-9])")
_MAX_PERIODS = 32  # the official script passes a regex flag as the count argument
_ARTICLES = frozenset(("a", "an", "the"))
_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {"none": "0"} | {word: str(number) for number, word in enumerate(_NUMBER_WORDS)}
# Words that are also recognised with any one apostrophe missing.
_CONTRACTIONS = """
'ow's'at 'twas ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't
he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't
needn't not've o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're
there's they'd they'd've they'll they're they've wasn't we'd've we've weren't what'll what're what's what've when's
where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've
y'all y'all'd've y'all'll you'd you'd've you'll you're you've
"""


def _restorable_contractions() -> dict[str, str]:
    """Return the contractions, by their spellings with one apostrophe missing."""
    contractions = {}
    for word in _CONTRACTIONS.split():
        for position, letter in enumerate(word):
            if letter == "'":
                contractions[word[:position] + word[position + 1 :]] = word
    contractions["somebody'd"] = "somebodyd"  # as in the official table
    return contractions


_WITH_APOSTROPHES = _restorable_contractions()


class VQAPrediction(Prediction, kw_only=True):
    """The answer to a question, with human answers or the score of each answer."""

    metadata_fields = Prediction.metadata_fields | {"question_id", "image_id", "answer_type", "question_type"}
    answer: str
    score: Score
    top_answers: Ranked = ()
    question_id: Id | None = None
    image_id: Id | None = None
    answers: tuple[str, ...] | None = None  # human answers
    answer_scores: dict[str, float] | None = None  # missing answers score 0 (LXMERT's code)
    multiple_choice_answer: str | None = None  # the most frequent answer
    answer_type: str | None = None
    question_type: str | None = None

    @property
    def accuracy(self) -> float | None:
        """The official accuracy, 0 to 1; None if the truth is unknown."""
        if self.answers is not None:
            return answer_accuracy(self.answer, self.answers)
        if self.answer_scores is not None:
            return float(self.answer_scores.get(self.answer, 0.0))
        return None


def clean_answer(answer: str) -> str:
    """Replace newlines and tabs by spaces, and strip."""
    return answer.replace("\n", " ").replace("\t", " ").strip()


def strip_punctuation(answer: str) -> str:
    """Apply the official punctuation step.

    Each mark (slashes, brackets, double quotes, = + _ - > < @ ` ; , ? !) is deleted if it is next to a space
    anywhere in the answer, or if there is a comma between two digits; otherwise it becomes a space. The first 32
    periods that no digit follows are deleted.
    """
    delete_all = _COMMA_IN_NUMBER.search(answer) is not None
    stripped = answer
    for mark in _MARKS:
        deleted = delete_all or f"{mark} " in answer or f" {mark}" in answer
        stripped = stripped.replace(mark, "" if deleted else " ")
    return _LOOSE_PERIOD.sub("", stripped, count=_MAX_PERIODS)


def standardise_words(answer: str) -> str:
    """Apply the official step on words: lower case, digits for none and zero to ten, no articles, all apostrophes.

    Articles alone give the empty string.
    """
    words = [_NUMBERS.get(word, word) for word in answer.lower().split()]
    return " ".join(_WITH_APOSTROPHES.get(word, word) for word in words if word not in _ARTICLES)


def normalise_answer(answer: str) -> str:
    """Apply all normalisation steps; answers are equal if their normalised strings are."""
    return standardise_words(strip_punctuation(clean_answer(answer)))


def answer_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """Score a prediction, 0 to 1: the mean over the human answers of min(1, matches among the other answers / 3).

    With ten answers, 0, 1, 2, 3 or more than 3 matches give 0, 0.3, 0.6, 0.9 or 1. When all human answers are the same
    string, answers are compared without normalisation, so case matters (as in the official script).
    """
    prediction = clean_answer(prediction)
    answers = [clean_answer(answer) for answer in answers]
    if len(set(answers)) > 1:
        prediction = normalise_answer(prediction)
        answers = [normalise_answer(answer) for answer in answers]
    matches = [answer == prediction for answer in answers]
    total = sum(matches)
    # summed one by one as in the script, for the same rounding
    return sum(min(1.0, (total - matched) / 3.0) for matched in matches) / len(matches)


def vqa_metrics(predictions: Sequence[VQAPrediction]) -> dict[str, float]:
    """Return the mean accuracies, 0 to 1.

    They are "count"; and if the truth is known, "accuracy", "accuracy/<answer type>" and
    "accuracy_by_question/<question type>".
    """
    scores: dict[str, list[float]] = defaultdict(list)
    for prediction in predictions:
        accuracy = prediction.accuracy
        if accuracy is None:
            continue
        scores["accuracy"].append(accuracy)
        if prediction.answer_type is not None:
            scores[f"accuracy/{prediction.answer_type}"].append(accuracy)
        if prediction.question_type is not None:
            scores[f"accuracy_by_question/{prediction.question_type}"].append(accuracy)
    means = {name: sum(values) / len(values) for name, values in sorted(scores.items())}
    return {"count": float(len(predictions)), **means}


def write_submission(path: Path, predictions: Sequence[VQAPrediction]) -> None:
    """Write predictions in the evaluation server's format: a JSON list of {"question_id": int, "answer": str}."""
    entries = [{"question_id": prediction.question_id, "answer": prediction.answer} for prediction in predictions]
    write_list(path, entries, ["question_id"])


def soft_scores(answers: Sequence[str], *, normalised: bool = False) -> dict[str, float]:
    """Compute the training target: the score of each distinct human answer, judged by the other answers.

    It is the mean over the answers of min(1, equal answers among the others / 3): 0.3, 0.6, 0.9 or 1 for an answer that
    occurs once, twice, three times or more often among ten.

    Args:
        answers: human answers of a question.
        normalised: count normalised answers; False counts raw strings (BAN's tool and the official VL-BERT code), so
            that "Two" does not count for the vocabulary's "2".
    """
    if normalised:
        answers = [normalise_answer(answer) for answer in answers]
    number = len(answers)
    scores = {}
    for answer, count in Counter(answers).items():
        of_same = count * min(3, count - 1)  # as each person who gave the answer sees it
        of_others = (number - count) * min(3, count)
        scores[answer] = (of_same + of_others) / (3 * number)
    return scores


def vocabulary_answer(answer: str) -> str:
    """Spell an annotation's most frequent answer as in vocabularies (BAN's tool): normalised, without commas."""
    return standardise_words(strip_punctuation(answer)).replace(",", "")

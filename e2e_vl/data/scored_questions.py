"""Questions whose answers have scores: the files of VQA and GQA of the official LXMERT code.

Files (`data.files`, relative to `data.root`; {split} is the split, such as train, and {images} what
`data.config.image_sets` says of it, such as mscoco_imgfeat/train2014)
    questions   vqa/{split}.json or gqa/{split}.json
    answers     trainval_label2ans.json: the list of possible answers
    images      folder of the images
    features    {images}_obj36.tsv
    detections  the same file for its boxes alone
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from detector.errors import UserError
from e2e_vl.box_sources import BoxSource
from e2e_vl.data.base import DataFiles, VLDataset, Wants, group_texts, split_names
from e2e_vl.data.formats.image_sets import ImageSets
from e2e_vl.data.formats.lxmert_files import ScoredQuestion, read_scored_questions
from e2e_vl.data.photo_ids import known_by_number
from e2e_vl.data.storage.record_table import RecordTable
from e2e_vl.samples import Sample, SampleImage, SampleText, ScoredAnswers


class ScoredQuestionDataset(VLDataset):
    """Questions of one or several splits, grouped by image.

    Args:
        questions: their indices are text indices.
        folders: of each question, the folder of its image.
        parts: placeholder values of each split, see `VLDataset.parts`.
    """

    known_files = ("images", "questions", "answers", "detections", "features")
    options = ImageSets
    box_sources = (BoxSource.ONLINE, BoxSource.DETECTIONS, BoxSource.PRECOMPUTED)

    def __init__(
        self,
        questions: Sequence[ScoredQuestion],
        folders: Sequence[Path],
        options: ImageSets,
        parts: Sequence[Mapping[str, str]],
    ) -> None:
        self.questions = RecordTable(ScoredQuestion, questions)
        self.folders = folders
        self.settings = options
        self.parts = parts
        self.groups = group_texts(question.image_id for question in questions)

    @classmethod
    def open(cls, files: DataFiles, options: ImageSets, split: str, wants: Wants) -> ScoredQuestionDataset:
        """`split` names one split or several joined by "+"; the top of this file says which files there are.

        Raises:
            ValueError: a question in two of the splits, or a split to train on that has no labels.
        """
        questions: dict[int | str, ScoredQuestion] = {}
        folders, parts = [], []
        for name in split_names(split):
            values = options.values(name)
            own = read_scored_questions(path := files.path("questions", **values), files.errors)
            if wants.training and own[0].scores is None:
                raise UserError(f"{path}: the split {name} has no labels to learn from; train on another split")
            own = options.kept(own, lambda one: [one.image_id], files, values, wants)
            twice = next((one.question_id for one in own if one.question_id in questions), None)
            if twice is not None:
                raise UserError(f"question {twice} is in two of the splits {split}; name each split once")
            questions |= {one.question_id: one for one in own}
            reads_images = wants.boxes is not BoxSource.PRECOMPUTED
            folders += [files.path("images", **values) if reads_images else Path()] * len(own)
            parts.append(values)
        return cls(list(questions.values()), folders, options, parts)

    @classmethod
    def reads(cls, options: ImageSets, split: str, wants: Wants) -> tuple[str, ...]:
        return tuple(key for key in super().reads(options, split, wants) if key != "answers")

    @classmethod
    def texts_of(cls, files: DataFiles, options: ImageSets, split: str) -> Iterable[str]:
        """All questions of a split and the best answer to each."""
        for question in cls._read(files, options, split):
            yield question.words
            if question.scores:
                yield max(question.scores, key=question.scores.get)

    @classmethod
    def answers_of(cls, files: DataFiles, options: ImageSets, split: str) -> dict[Any, str]:
        """The best answer to each question that has one."""
        found = cls._read(files, options, split)
        return {one.question_id: max(one.scores, key=one.scores.get) for one in found if one.scores}

    @staticmethod
    def _read(files: DataFiles, options: ImageSets, split: str) -> list[ScoredQuestion]:
        paths = [files.path("questions", **options.values(name)) for name in split_names(split)]
        return [question for path in paths for question in read_scored_questions(path, files.errors)]

    def __len__(self) -> int:
        """Number of questions."""
        return len(self.questions)

    def image_ids(self) -> Iterable[str]:
        return (self.questions[texts[0]].image_id for texts in self.groups)

    def truths(self) -> Iterable[ScoredAnswers | None]:
        return map(_truth, self.questions)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some questions about one image."""
        name = self.questions[texts[0]].image_id
        file = self.settings.file(self.folders[texts[0]], name)
        image = SampleImage(name, file, known_as=known_by_number(name))
        return Sample((image,), tuple(self._text(index) for index in texts))

    def _text(self, index: int) -> SampleText:
        """The id stands under the names that it has in the official files of both data sets."""
        one = self.questions[index]
        facts = {"question_id": one.question_id, "questionId": str(one.question_id), "question": one.words}
        facts["image_id"] = one.image_id
        if one.scores is not None:
            facts["answer_scores"] = dict(one.scores)
        for key in ("question_type", "answer_type"):
            if getattr(one, key) is not None:
                facts[key] = getattr(one, key)
        return SampleText(index, one.words, facts, _truth(one))


def _truth(question: ScoredQuestion) -> ScoredAnswers | None:
    return None if question.scores is None else ScoredAnswers(question.scores)

"""How often a guess is right that looks neither at the image nor at the text: computed from the data of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import torch

from detector.boxes import pairwise_iou
from detector.errors import UserError
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.data.base import VLDataset
from e2e_vl.metrics.vqa import answer_accuracy
from e2e_vl.run.build import make_synthetic_data, named_parts, open_split
from e2e_vl.samples import (
    AnnotatedObjects,
    ChoiceText,
    CorrectAnswer,
    HumanAnswers,
    PhraseBoxes,
    ReferredBox,
    SampleText,
)
from e2e_vl.text import basic_tokenize

RIGHT_IOU = 0.5


def chance_of(config: RunConfig, split: str) -> float:
    """The accuracy of the best guess on a split, with annotated boxes as candidates.

    Boxes: any candidate, each as likely. Answers and labels: the one that is most frequent in the training split.
    Choices among texts: any, each as likely. Captions, for masked words: the most frequent word of the training split.
    The data are drawn first if the settings ask for it.

    Raises:
        ValueError: the split has no truth that a guess could be compared with.
    """
    make_synthetic_data(config)
    dataset = open_split(config, split, BoxSource.GT, training=False)
    spell = named_parts(config).task[1].spell_answer
    usual: list[str] = []

    def guess(own: Callable[[SampleText], str | None]) -> str:
        if not usual:
            trained = open_split(config, config.data.train_split, BoxSource.GT, training=True)
            counts = Counter(own(text) for text, _ in _texts(trained))
            counts.pop(None, None)
            usual.append(min(counts, key=lambda answer: (-counts[answer], answer)))
        return usual[0]

    scores: list[float] = []
    for text, objects in _texts(dataset):
        truth = text.truth
        if isinstance(truth, ReferredBox):
            scores.append(_share_right(objects, np.array([truth.box])))
        elif isinstance(truth, PhraseBoxes):
            scores += [_share_right(objects, boxes) for boxes in truth.boxes or () if len(boxes)]
        elif isinstance(truth, HumanAnswers):
            scores.append(answer_accuracy(guess(lambda one: _most_frequent(one, spell)), truth.answers))
        elif isinstance(truth, CorrectAnswer):
            if text.metadata.get("isBalanced", True):  # only they are scored
                scores.append(float(guess(lambda one: spell(one.truth.answer)) == spell(truth.answer)))
        elif isinstance(text, ChoiceText):
            scores.append(1 / len(text.choices))
        elif truth is not None:
            scores.append(float(guess(lambda one: str(one.truth.number)) == str(truth.number)))
    if scores:
        return float(np.mean(scores))
    return _most_frequent_word(config, dataset)


def _texts(dataset: VLDataset) -> Iterable[tuple[SampleText, AnnotatedObjects | None]]:
    """All texts, and the annotated objects of their first image."""
    for texts in dataset.groups:
        sample = dataset.sample(texts)
        for text in sample.texts:
            yield text, sample.images[0].objects


def _share_right(objects: AnnotatedObjects, boxes: np.ndarray) -> float:
    candidates, wanted = (torch.as_tensor(np.asarray(one, dtype=np.float64)) for one in (objects.boxes, boxes))
    return float((pairwise_iou(candidates, wanted).amax(dim=1) >= RIGHT_IOU).double().mean())


def _most_frequent(text: SampleText, spell: Callable[[str], str]) -> str | None:
    if text.truth is None:
        return None
    return Counter(map(spell, text.truth.answers)).most_common(1)[0][0]


def _most_frequent_word(config: RunConfig, dataset: VLDataset) -> float:
    trained = open_split(config, config.data.train_split, BoxSource.GT, training=True)
    seen, asked = (
        Counter(word for text, _ in _texts(one) for word in basic_tokenize(text.words)) for one in (trained, dataset)
    )
    if not asked:
        raise UserError(f"{config.data.name}: there is nothing to guess in the data.")
    word = min(seen, key=lambda one: (-seen[one], one))
    return asked[word] / asked.total()

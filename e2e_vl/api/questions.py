"""The questions that a call of `ask` states: every combination of single values and lists."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from detector.errors import UserError
from e2e_vl.data.user_images import IMAGE_SUFFIXES, expand_images, list_items, to_image_file
from e2e_vl.data.user_inputs import BoxesOfImages, boxes_of_image
from e2e_vl.samples import AnnotatedObjects, Question


def make_questions(
    image: Any, text: Any, given_boxes: AnnotatedObjects | BoxesOfImages | None, choices: Any, answer: Any
) -> tuple[list[Question], bool]:
    """Return the questions of a call of `ask`, and whether it asks for a list of answers."""
    if isinstance(image, str) and is_image(text) and not is_image(image):
        raise UserError(f"'{image}' is no image; give the image first and then the text: ask(image, text).")
    images = expand_images(image)
    texts = list_items(text)
    is_list = images is not None or texts is not None
    count = 1
    if texts is not None:
        count = len(texts)
    elif images is not None:
        count = len(images)
    if choices is None:
        choices = ()
    all_images = repeat_for_questions(
        image if images is None else images,
        count,
        lambda value: not isinstance(value, list),
        "image must be one image (a tuple: those that one text is about)",
    )
    all_texts = repeat_for_questions(text if texts is None else texts, count, is_text, "text must be a string")
    all_choices = repeat_for_questions(
        list_items(choices),
        count,
        lambda value: isinstance(value, list | tuple) and all(map(is_text, value)),
        "choices must be a list of strings",
    )
    all_answers = repeat_for_questions(
        answer, count, lambda value: value is None or is_text(value), "answer must be a string"
    )
    groups = []  # the images of each question
    for images_of_question in all_images:
        groups.append(images_of_question if isinstance(images_of_question, tuple) else (images_of_question,))
    distinct = {id(source): source for source in itertools.chain.from_iterable(groups)}
    files = {key: to_image_file(source) for key, source in distinct.items()}
    questions = []
    for group, question_text, question_choices, given_answer in zip(
        groups, all_texts, all_choices, all_answers, strict=True
    ):
        if not group:
            raise UserError("An image is an empty tuple; give one image, or the images that one text is about.")
        first, *others = (files[id(source)] for source in group)
        boxes = boxes_of_image(given_boxes, first)
        questions.append(
            Question(first, question_text, boxes, tuple(question_choices), given_answer, others=tuple(others))
        )
    return questions, is_list


def repeat_for_questions(value: Any, count: int, is_single: Callable[[Any], bool], what: str) -> list[Any]:
    """Return a single value `count` times, or a list of `count` values; `what` begins the error message."""
    if is_single(value):
        return [value] * count
    if not isinstance(value, list | tuple) or len(value) != count or not all(map(is_single, value)):
        raise UserError(f"{what}, or a list with one for each of the {count} questions.")
    return list(value)


def is_text(value: Any) -> bool:
    """Return whether a value is a text, of Python or numpy."""
    return isinstance(value, str)


def is_image(value: Any) -> bool:
    """Return whether a value is meant as an image: an address, the name of an image file, or pixels."""
    if isinstance(value, str):
        return value.startswith(("https://", "http://", "data:")) or value.lower().endswith(IMAGE_SUFFIXES)
    return isinstance(value, bytes | os.PathLike | Image.Image | np.ndarray) or hasattr(value, "detach")


def check_top_k(top_k: Any) -> int | None:
    """Return a number of answers, which is at least 1; None: the task's own number."""
    if top_k is None:
        return None
    try:
        number = operator.index(top_k)
    except TypeError:
        number = 0
    if number < 1 or isinstance(top_k, bool):
        raise UserError(f"top_k={top_k!r} must be an integer of at least 1, or None for the task's own number.")
    return number


def check_min_score(min_score: Any) -> float | None:
    """Return the lowest score of an answer, 0 to 1; None: there is no limit."""
    if min_score is None:
        return None
    if isinstance(min_score, bool) or not isinstance(min_score, int | float | np.number) or not 0 <= min_score <= 1:
        raise UserError(f"min_score={min_score!r} must be a number from 0 to 1, or None for no limit.")
    return float(min_score)

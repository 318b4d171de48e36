"""VCR's texts for a question that a user asks about an image.

Text names objects as in VCR's files: "Why is [0] smiling at [1,2]?" is about the boxes 0, 1 and 2 that are given.
"""

from __future__ import annotations

import re

import numpy as np
from transformers import PreTrainedTokenizerBase

from e2e_vl.config import DataSettings
from e2e_vl.data import vcr_text
from e2e_vl.data.asked import Asked, GivenBoxes
from e2e_vl.data.examples import Example, TextExample
from e2e_vl.data.files import read_options
from e2e_vl.data.instance_masks import instance_mask
from e2e_vl.data.vcr_files import CHOICES, Sentence
from e2e_vl.data.vcr_options import VCROptions

_TAG = re.compile(r"\[\s*(\d+(?:\s*,\s*\d+)*)\s*\]")


def read_sentence(text: str, num_objects: int) -> Sentence:
    """Words and lists of objects.

    Raises:
        ValueError: a tag of an object that is not given, or no word at all.
    """
    sentence: Sentence = []
    for position, part in enumerate(_TAG.split(text)):  # text, tag, text, tag, ...
        if position % 2 == 0:
            sentence += part.split()
            continue
        objects = [int(number) for number in part.split(",")]
        if max(objects) >= num_objects:
            raise ValueError(
                f"'{text}' names the object [{max(objects)}], but {num_objects} boxes are given (counted from 0); give "
                "its box too."
            )
        sentence.append(objects)
    if not sentence:
        raise ValueError("The question or one of the choices is empty.")
    return sentence


def asked_example(
    asked: Asked, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, channel_order: str
) -> Example:
    """The four texts of the question, built as those of `VCRDataset` in evaluation.

    Boxes without a class name are people; without outlines the whole rectangle counts as the object.

    Raises:
        ValueError: no boxes, a class that the run does not know, other than four choices, or an answer where none is
            read or none where one is (a run for rationales).
    """
    options = read_options(VCROptions, settings.config, "data.config")
    is_answer = options.question == "answer"
    if asked.boxes is None:
        raise ValueError("VCR's boxes are given, not found: give them with --boxes, such as person:10,20,80,200.")
    if len(asked.choices) != CHOICES:
        raise ValueError(f"VCR chooses one of four texts, here are {len(asked.choices)}; give four with --choices.")
    if is_answer and asked.answer is not None:
        raise ValueError("This run chooses answers, so it takes none; leave --answer out.")
    if not is_answer and asked.answer is None:
        raise ValueError("This run chooses rationales, so it needs the answer that they are for; give it as --answer.")
    given = asked.boxes
    objects = given.names or [vcr_text.PERSON] * len(given)
    unknown = [name for name in objects if name not in options.class_names]
    if unknown:
        raise ValueError(
            f"{given.source}: the class '{unknown[0]}' is none of the run's {len(options.class_names)} classes "
            f"({', '.join(options.class_names[:4])}, ...)."
        )
    query = [read_sentence(asked.text, len(objects))]
    if not is_answer:
        query.append(read_sentence(asked.answer, len(objects)))
    choices = [read_sentence(choice, len(objects)) for choice in asked.choices]

    kept = list(range(len(objects)))
    if options.objects == "mentioned":
        kept = vcr_text.mentioned_objects([*query, *choices])
    elif options.objects == "r2c":
        kept = vcr_text.relevant_objects(objects, [*query, *choices])
    names, rows = list(objects), [-1] * len(objects)
    for row, name in enumerate(vcr_text.names_of([objects[number] for number in kept], options.people_names)):
        names[kept[row]], rows[kept[row]] = name, row

    pieces = [
        vcr_text.encode_sentence(sentence, names, rows, tokenizer, options.join_word) for sentence in (*query, *choices)
    ]
    front, encoded = pieces[: len(query)], pieces[len(query) :]
    if options.blank_question:
        front = [[] for _ in front]
    if is_answer:
        vcr_text.cut_answers(front[0], encoded, options.max_pieces)
    else:
        vcr_text.cut_rationales(front[0], front[1], encoded, options.max_pieces)

    image, _ = asked.load(settings, channel_order, GivenBoxes(given.boxes[kept], source=given.source))
    side = options.mask_size
    if side is not None:
        image.roi_masks = np.ones((len(kept), side, side), dtype=np.float32)
        for row, number in enumerate(kept if given.outlines is not None else []):
            image.roi_masks[row] = instance_mask(given.outlines[number], given.boxes[number], side)
    classes = [options.class_names.index(objects[number]) + 1 for number in kept]
    image.region_targets = {"object_class": np.array(classes, dtype=np.int64)}
    record = asked.record() | {
        "annot_id": "asked",
        "kind": options.question,
        "label": None,
        "choices": [vcr_text.plain_text(choice, names, options.join_word) for choice in choices],
        "question": " ".join(vcr_text.plain_text(sentence, names, options.join_word) for sentence in query),
        "objects": [names[number] for number in kept],
    }
    joined = [piece for sentence in front for piece in sentence]
    texts = []
    for choice in encoded:
        input_ids, segment_ids, region_of_token = vcr_text.join_choice(joined, choice, tokenizer)
        texts.append(
            TextExample(
                input_ids=input_ids,
                segment_ids=segment_ids,
                looks_at=(0,),
                targets={},
                record=record,
                region_of_token=region_of_token,
            )
        )
    return Example([image], texts)

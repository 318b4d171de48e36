"""The VQA files: each answer is right, judged from the annotations alone, and words give little away."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import numpy as np
import pytest

from e2e_vl.synthetic.config import SceneConfig
from e2e_vl.synthetic.gqa import draw_questions as draw_gqa_questions
from e2e_vl.synthetic.scenes import SceneGraph, draw_scene
from e2e_vl.synthetic.vqa import draw_vqa_questions
from tests.synthetic.meaning import NUMBERS, SPLITS, answer, words_of


@pytest.fixture(scope="module")
def pairs(synthetic_folder) -> list[tuple[dict, dict]]:
    """(question, annotation) of all splits."""
    found = []
    for split in SPLITS:
        folder = synthetic_folder / "vqa"
        questions = json.loads((folder / f"v2_OpenEnded_mscoco_{split}_questions.json").read_text())
        annotations = json.loads((folder / f"v2_mscoco_{split}_annotations.json").read_text())
        found += zip(questions["questions"], annotations["annotations"], strict=True)
    return found


def test_answers_are_right_and_people_disagree_a_little(pairs, coco):
    agreeing = []
    for question, annotation in pairs:
        right = answer(question["question"], words_of(coco, question["image_id"]))
        given = [row["answer"] for row in annotation["answers"]]
        votes = Counter(str(NUMBERS.get(one, one)) for one in given)
        assert votes.most_common(1)[0][0] == right, question["question"]
        assert annotation["multiple_choice_answer"] in given
        agreeing.append(votes[right] / 10)
    assert 0.88 < np.mean(agreeing) < 0.96
    assert min(agreeing) < 0.9


def test_words_give_little_away(pairs):
    answers = defaultdict(Counter)
    for _, annotation in pairs:
        answers[annotation["question_type"]][annotation["multiple_choice_answer"]] += 1
    limits = {"what color is the": 0.3, "what is the": 0.3, "how many": 0.5, "is there a": 0.62, "is the": 0.62}
    assert set(answers) == set(limits)
    for kind, counted in answers.items():
        assert max(counted.values()) / counted.total() < limits[kind], (kind, counted)


def test_scenes_with_few_attributes_still_have_questions():
    config = SceneConfig(min_objects=1, max_objects=1, shapes=("circle",), colours=("red",), textures=("plain",))
    graph = SceneGraph(draw_scene(config, np.random.default_rng(0)))
    assert draw_gqa_questions(graph, config.values, np.random.default_rng(0))
    questions = draw_vqa_questions(graph, config, np.random.default_rng(0))
    assert any(question["kind"] == "count" for question in questions)

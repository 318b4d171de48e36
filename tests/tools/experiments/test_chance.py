"""Guesses on drawn data against counts that are made from the files."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from chance import chance_of
from e2e_vl.config import load_config
from e2e_vl.text import basic_tokenize

ROOT = Path(__file__).parents[3]
TASKS = ROOT / "configs" / "tiny"


@pytest.fixture
def guess(tiny_words):
    root = next(word for word in tiny_words if word.startswith("data.root="))

    def chance(task: str, split: str = "val") -> float:
        config = load_config(TASKS / f"{task}.yaml", [root, f"detector.config={ROOT}/configs/detector/tiny.yaml"])
        synthetic = dataclasses.replace(config.data.synthetic, scenes={})  # they are drawn
        return chance_of(dataclasses.replace(config, data=dataclasses.replace(config.data, synthetic=synthetic)), split)

    chance.root = Path(root.removeprefix("data.root="))
    return chance


def usual(values: list[str]) -> str:
    counts = Counter(values)
    return min(counts, key=lambda one: (-counts[one], one))


def test_one_of_six_boxes(guess):
    """Every scene has six objects; some overlap so much that two of them are right."""
    assert 1 / 6 <= guess("refcoco") < 1 / 4
    assert 1 / 6 <= guess("flickr30k") < 1 / 2


def test_one_of_four_texts(guess):
    assert guess("vcr") == 0.25


def test_the_usual_label(guess):
    files = (guess.root / "nlvr2" / "data" / f"{name}.json" for name in ("train", "val"))
    train, val = ([json.loads(line)["label"] for line in path.read_text().splitlines()] for path in files)
    assert guess("nlvr2") == pytest.approx(val.count(usual(train)) / len(val))


def test_the_usual_answer(guess):
    def answers(name: str) -> list[str]:
        questions = json.loads((guess.root / "gqa" / "questions" / f"{name}_questions.json").read_text()).values()
        return [one["answer"] for one in questions if one["isBalanced"]]

    val = answers("val_all")
    assert guess("gqa", "val_all") == pytest.approx(val.count(usual(answers("train_balanced"))) / len(val))
    content = json.loads((guess.root / "vqa" / "v2_mscoco_val_annotations.json").read_text())["annotations"]
    most = max(Counter(answer["answer"] for one in content for answer in one["answers"]).values())
    assert 0 < guess("vqa") <= min(1.0, most / 10 / len(content) * 4)


def test_the_usual_word(guess):
    def words(name: str) -> list[str]:
        content = json.loads((guess.root / "captions" / f"captions_{name}.json").read_text())["annotations"]
        return [word for one in content for word in basic_tokenize(one["caption"])]

    val = words("val")
    assert guess("pretraining") == pytest.approx(val.count(usual(words("train"))) / len(val))

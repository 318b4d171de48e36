"""Rules of the data against what the official LXMERT code computed: region features, masking with the recorded draws,
pairing, cutting, answers, and answer heads that start from pre-training.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from detector.structures import Regions
from e2e_vl.data.answer_lists import read_answers
from e2e_vl.data.features import RegionFeatures, TsvStore
from e2e_vl.data.image_loader import StoredBoxes
from e2e_vl.region_masking import replace_features, sample_masked_regions, sample_replacements
from e2e_vl.run.build import ADAPTERS
from e2e_vl.samples import BoxPredictions, Sample, SampleText, ScoredAnswers
from e2e_vl.structures import RegionMasks
from e2e_vl.tasks.base import Sizes
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.words import mask_words
from e2e_vl.tasks.pretraining import PretrainingPreprocessor, PretrainingTask, build_objectives
from e2e_vl.text import TextTokenizer, load_tokenizer, simplify_answer
from e2e_vl.weights.loading import InitRules, load_task
from tests.parity import lxmert_common as common
from tests.parity.lxmert_common import assert_near
from tests.parity.lxmert_finetuning_checks import answering_task

golden = common.golden

SHARES = (0.8, 0.1)  # of the chosen words: [MASK], another one; of the chosen regions: zeros, another feature


@pytest.fixture(scope="module")
def rules(golden) -> dict[str, Any]:
    golden.require("data.json")
    return json.loads((golden.folder / "data.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer(golden) -> PreTrainedTokenizerBase:
    golden.require("vocab.txt")
    return load_tokenizer(golden.folder / "vocab.txt")


def answer_sources(rules: dict[str, Any]) -> list[str] | None:
    given = rules["config"]["qa_sets"]
    return given.split(",") if isinstance(given, str) else given


def answer_list(golden, rules) -> list[str]:
    golden.require("data")
    return read_answers(golden.folder / "data" / "lxmert" / "all_ans.json", answer_sources(rules))


def test_rows_of_the_tsv_files(golden, rules):
    golden.require("data")
    arrays = golden["data"]
    for name, recorded in rules["tsv"].items():
        store = TsvStore(golden.folder / recorded["path"])
        assert store.ids == [row["img_id"] for row in recorded["rows"]]
        for number, row in enumerate(recorded["rows"]):
            found = store[row["img_id"]]
            assert found.image_size == (row["img_h"], row["img_w"])
            assert len(found) == row["num_boxes"]
            labels = found.predictions
            columns = {"objects_id": labels.classes, "objects_conf": labels.scores, "attrs_id": labels.attributes}
            columns |= {"attrs_conf": labels.attribute_scores, "boxes": found.boxes, "features": found.features}
            for column, ours in columns.items():
                np.testing.assert_array_equal(ours, arrays[f"tsv.{name}.{column}"][number], column)
            check_candidates(store, found)


def check_candidates(store: TsvStore, found: RegionFeatures) -> None:
    """What the detector found stays with its box on the way to the model; boxes come by falling score."""
    boxes = StoredBoxes([store], None, with_features=True).read(found.image_id)
    order = np.argsort(-found.predictions.scores, kind="stable")
    for field in dataclasses.fields(BoxPredictions):
        values = getattr(found.predictions, field.name)
        np.testing.assert_array_equal(getattr(boxes.predictions, field.name), values[order], field.name)
    np.testing.assert_array_equal(boxes.features, found.features[order])


def test_spelling_of_answers(rules):
    for answer, spelled in rules["convert_answer"]:
        assert simplify_answer(answer) == spelled, answer


def test_list_of_answers(golden, rules):
    assert answer_list(golden, rules) == rules["answer_table"]["answers_in_order"]


def test_texts_and_their_cutting(rules, tokenizer):
    for one in rules["texts"]:
        text_tokenizer = TextTokenizer(tokenizer, max_length=one["max_length"])
        pieces = text_tokenizer.pieces(one["sentence"])
        assert tokenizer.convert_ids_to_tokens(pieces)[: len(one["tokens"])] == one["tokens"]
        encoding, real = text_tokenizer.single(pieces), np.array(one["input_mask"], dtype=bool)
        np.testing.assert_array_equal(encoding.input_ids, np.array(one["input_ids"])[real])
        assert not encoding.token_type_ids.any()
    for texts in rules.get("finetune_texts", {}).values():
        for one in texts:
            assert tokenizer.tokenize(one["sentence"]) == one["tokens"]


# Pre-training items with every recorded draw


class RecordedDraws:
    """Gives recorded numbers in the place of random ones.

    The official code draws all that belongs to a word, or to a region, before it goes on to the next one; here all
    words, and all regions, are chosen at once. So each kind of draw has a queue.
    """

    def __init__(self, words: int, pool: int, sentence: Sequence[list], rest: Sequence[list]):
        uniform = [one[1] for one in rest if one[0] == "random"]
        self.sentence = iter([one[-1] for one in sentence])
        self.words, self.regions = uniform[:words], uniform[words:]
        self.put_in: Iterator[int] = iter([one[2] for one in rest if one[0] == "choice"])
        self.replacement_index: Iterator[int] = iter([one[-1] for one in rest if one[0] == "randint"])
        self.answers = [one for one in rest if one[0] == "multinomial"]
        self.pool = pool

    def spawn(self, count: int) -> list[RecordedDraws]:
        return [self] * count

    def random(self, size: int | None = None) -> float | np.ndarray:
        """Words beyond the cut are drawn for here, and are not in the official code."""
        if size is None:
            return next(self.sentence)
        return np.array([*self.words, *[1.0] * (size - len(self.words))])

    def integers(self, high: int, size: int | None = None) -> int | np.ndarray:
        if size is not None:
            return np.array([next(self.put_in) for _ in range(size)], dtype=np.int64)
        return next(self.sentence) if high == self.pool else 0  # 0: the seed of what the model draws

    def choice(self, count: int, p: np.ndarray) -> int:
        [(_, shares, picked)] = self.answers
        np.testing.assert_allclose(p, shares, rtol=1e-6)
        assert count == len(shares)
        return picked

    def assert_used_up(self) -> None:
        assert not list(self.sentence) and not list(self.put_in)


class DonorDraws:
    """The image and the region of each donor."""

    def __init__(self, numbers: Iterator[int]):
        self.integers = lambda high: next(numbers)


def truths(golden) -> dict[str, ScoredAnswers | None]:
    """uid -> answers as written, from all files of pre-training."""
    golden.require("data")
    found = {}
    for path in sorted((golden.folder / "data" / "lxmert").glob("*.json")):
        for image in json.loads(path.read_text(encoding="utf-8")):
            for source, sentences in image.get("sentf", {}).items():
                labels = image.get("labelf", {}).get(source, [None] * len(sentences))
                for number, label in enumerate(labels):
                    truth = None if label is None else ScoredAnswers(label)
                    found[f"{image['img_id']}_{source}_{number:03d}"] = truth
    return found


def make_preprocessor(golden, rules, tokenizer) -> PretrainingPreprocessor:
    answers = rules["answer_table"]["answers_in_order"]
    settings = {
        "masked_words": {"weight": 1.0, "whole_words": False, "probability": rules["config"]["word_mask_rate"]},
        "masked_text": 0.0,
        "masked_regions": 0.0,
        "relationship": 1.0,
        "image_qa": {"weight": 1.0, "answers": answers},
    }
    objectives = build_objectives(settings, Sizes(8, len(tokenizer)))
    task = PretrainingTask(Sizes(8, len(tokenizer)), PretrainingConfig(), objectives)
    return task.preprocessor(TextTokenizer(tokenizer, max_length=rules["config"]["max_length"], training=True))


def draws_of(one: dict[str, Any], objects: int, pool: int) -> RecordedDraws:
    words = sum(draw[0] == "random" for draw in one["draws_masking_and_answer"]) - objects
    assert words == len(one["tokens_before_masking"])
    return RecordedDraws(words, pool, one["draws_sentence"], one["draws_masking_and_answer"])


def test_sentences_words_and_answers_of_pretraining(golden, rules, tokenizer):
    items, arrays, known = rules["flattened"], golden["data"], truths(golden)
    preprocessor, pool = make_preprocessor(golden, rules, tokenizer), [item["sent"] for item in items]
    assert rules["pretrain_items"]
    for row, one in enumerate(rules["pretrain_items"]):
        item = items[one["item"]]
        own = [number for number, other in enumerate(items) if other["img_id"] == item["img_id"]]
        text = SampleText(one["item"], item["sent"], {}, truth=known[item["uid"]], image_index=())
        draws = draws_of(one, rules["config"]["objects"], len(items))
        [made] = preprocessor(Sample((), (text,), pool=pool, own_texts=own), (), lambda _, draws=draws: draws)
        draws.assert_used_up()
        real = arrays["pretrain.input_mask"][row].bool()
        name = f"item {row}, {one['uid']}"
        np.testing.assert_array_equal(made.encoding.input_ids, arrays["pretrain.input_ids"][row][real], name)
        np.testing.assert_array_equal(made.encoding.token_type_ids, arrays["pretrain.segment_ids"][row][real], name)
        parts = made.targets.parts
        np.testing.assert_array_equal(parts["masked_words"].labels, arrays["pretrain.lm_label_ids"][row][real], name)
        assert int(parts["image_qa"].answer) == int(arrays["pretrain.ans"][row]) == one["ans"], name
        assert made.record["is_match"] == bool(one["is_matched"]) == bool(arrays["pretrain.is_matched"][row])
        assert made.record["text"] == one["sentence"]


@functools.cache
def stores(folder: Path) -> tuple[TsvStore, ...]:
    return tuple(TsvStore(path) for path in sorted(folder.glob("data/*imgfeat/*.tsv")))


def regions_of_image(folder: Path, name: str) -> RegionFeatures:
    return next(store[name] for store in stores(folder) if name in store)


def test_masked_regions_of_pretraining(golden, rules):
    """Donors are drawn among the images of the official items here, so the batch holds the image of each item."""
    golden.require("data")
    items, arrays, config = rules["flattened"], golden["data"], rules["config"]
    images = [regions_of_image(golden.folder, item["img_id"]) for item in items]
    counts = [len(image) for image in images]
    regions = Regions(
        [torch.from_numpy(image.boxes) for image in images],
        [torch.from_numpy(image.features) for image in images],
        [torch.zeros(count, 0) for count in counts],
    )
    for row, one in enumerate(rules["pretrain_items"]):
        draws = draws_of(one, config["objects"], len(items))
        draws.words = draws.regions
        chosen, hidden, swapped = sample_masked_regions(counts[one["item"]], draws, config["obj_mask_rate"], *SHARES)
        replacement_index = [torch.full((count,), -1) for count in counts]
        replacement_index[one["item"]] = torch.from_numpy(
            sample_replacements(swapped, counts, DonorDraws(draws.replacement_index))
        )
        assert not list(draws.replacement_index)
        nothing = [torch.zeros(count, dtype=torch.bool) for count in counts]
        found = replace_features(regions, RegionMasks(nothing, nothing, replacement_index), whole_image=False)
        features = found.features[one["item"]].masked_fill(torch.from_numpy(hidden)[:, None], 0.0)
        check_item(arrays, row, images[one["item"]], features, chosen)


def check_item(arrays: dict[str, Tensor], row: int, image: RegionFeatures, features: Tensor, chosen: np.ndarray):
    assert torch.equal(features, arrays["pretrain.visual_feats"][row]), f"features of item {row}"
    np.testing.assert_array_equal(chosen, arrays["pretrain.feat_mask"][row] > 0)
    np.testing.assert_array_equal(image.features, arrays["pretrain.target_feats"][row])
    height, width = image.image_size
    shares = torch.from_numpy(image.boxes / np.array([width, height, width, height], dtype=np.float32))
    assert_near(shares, arrays["pretrain.boxes"][row], f"boxes of item {row}")
    labels = image.predictions
    columns = {"obj_labels": labels.classes, "obj_confs": labels.scores, "attr_labels": labels.attributes}
    for name, ours in (columns | {"attr_confs": labels.attribute_scores}).items():
        np.testing.assert_array_equal(ours, arrays[f"pretrain.{name}"][row], name)


def assert_share(ours: float, theirs: int, of: int, count: int) -> None:
    """Two shares of draws with the same probability, within five standard deviations of their difference."""
    share = theirs / of
    assert abs(ours - share) < 5 * np.sqrt(share * (1 - share) * (1 / of + 1 / count))


def test_how_often_words_and_regions_are_masked(rules, tokenizer):
    recorded, count = rules["rates"], 40_000
    words, mask_id = recorded["word"], tokenizer.mask_token_id
    unused = len(tokenizer) + 7  # a word that no random entry is
    ids, labels = mask_words(
        [[unused]] * count,
        np.random.default_rng(0),
        mask_id=mask_id,
        vocab_size=len(tokenizer),
        probability=recorded["word_mask_rate"],
    )
    chosen = labels >= 0
    number = int(chosen.sum())
    assert_share(chosen.mean(), words["labelled"], words["words"], count)
    random = len(tokenizer) ** -1  # [MASK] and the word itself may be random entries
    assert_share((ids[chosen] == mask_id).mean() - 0.1 * random, words["mask"], words["labelled"], number)
    assert_share((ids[chosen] == unused).mean(), words["same"], words["labelled"], number)
    regions = recorded["region"]
    chosen, hidden, swapped = sample_masked_regions(count, np.random.default_rng(1), recorded["obj_mask_rate"], *SHARES)
    number = int(chosen.sum())
    assert_share(chosen.mean(), regions["labelled"], regions["regions"], count)
    assert_share(hidden[chosen].mean(), regions["zero"], regions["labelled"], number)
    assert_share(swapped[chosen].mean(), regions["changed"], regions["labelled"], number)
    assert not (hidden & swapped).any() and not (swapped & ~chosen).any()


def test_an_answer_head_that_starts_from_pretraining(golden, rules, tmp_path):
    recorded, arrays = rules["answer_head"], golden["data"]
    before = golden.part("data", "head.pretrained.")
    file = {f"module.answer_head.logit_fc.{name}": value for name, value in before.items()}
    hidden = before["0.weight"].shape[1]
    file |= {"module.cls.seq_relationship.weight": torch.zeros(2, hidden)}
    file |= {"module.bert.encoder.visn_fc.visn_fc.bias": torch.zeros(hidden)}
    torch.save(file, tmp_path / "Epoch20_LXRT.pth")
    table = [{"ans": answer, "dsets": ["vqa"]} for answer in recorded["table"]]
    (tmp_path / "all_ans.json").write_text(json.dumps(table), encoding="utf-8")
    task = answering_task(hidden, len(recorded["label2ans"]))
    task.answer_vocabulary.answers[:] = recorded["label2ans"]
    report = load_task(task, tmp_path / "Epoch20_LXRT.pth", InitRules("vqa", ADAPTERS["lxmert"]))
    places = {"0": "transform.dense", "2": "transform.norm", "3": "output"}
    state = task.head.state_dict()
    for name, value in golden.part("data", "head.after.").items():
        number, kind = name.split(".")
        assert torch.equal(state[f"{places[number]}.{kind}"], value), name
    found = int((arrays["head.after.3.weight"].abs().sum(dim=1) > 0).sum())
    assert f"{found} of {len(recorded['label2ans'])} answers" in report.copied[-1]
    assert recorded["printed"].startswith(f"Loaded {found} answers")

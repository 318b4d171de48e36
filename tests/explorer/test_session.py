"""What the explorer's page shows: answers, attention of words and regions, and answers when regions are masked."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import e2e_vl
from detector.errors import UserError
from detector.images import mask_rectangles, normalise_images
from e2e_vl.drawing import PALETTE
from e2e_vl.explorer.session import (
    GREY,
    Explorer,
    Inspection,
    Session,
    UserImage,
    draw_answer,
    draw_regions,
    percent,
    read_boxes,
    read_image,
)
from e2e_vl.run.build import build_model
from e2e_vl.run.checkpoint import save_model
from e2e_vl.samples import Question
from e2e_vl.text import load_tokenizer
from tests.run.runs import predictions_of
from tests.weights.starts import replaced

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def record(trained_run) -> dict:
    """A prediction of the evaluation with the detector's predicted boxes."""
    return predictions_of(trained_run.path, "val_online")[0]


@pytest.fixture(scope="module")
def explorer(trained_run) -> Explorer:
    return Explorer(e2e_vl.load(trained_run.path, device="cpu"))


@pytest.fixture(scope="module")
def demo() -> Explorer:
    return Explorer(e2e_vl.load("demo", device="cpu"))


@pytest.fixture(scope="module")
def asked(explorer, record) -> Session:
    return ask(explorer, record["file_name"], record["text"])


def ask(explorer: Explorer, file: str | Path, text: str) -> Session:
    return explorer.ask(Session(read_image(Path(file))), text)


def with_item(session: Session, item: int, **more) -> Session:
    return dataclasses.replace(session, item=item, **more)


def shown_on_page(session: Session) -> dict[str, Any]:
    """What the page's components show."""
    pytest.importorskip("gradio", reason='gradio is not installed; pip install "e2e-vl[explore]" lets this test run')
    from e2e_vl.explorer.web_page import values

    return values(session, "")


def test_attention_of_a_word_and_of_a_region(explorer, asked, record):
    assert asked.after is None and asked.masked == () and asked.attention is None and len(asked.before) > 2
    seen, first = asked.before, len(asked.before.words)
    words = record["text"].split()
    assert list(seen.words[1 : 1 + len(words)]) == words and seen.item_name(1) == f"1: {words[0]}"
    assert seen.item_name(first + 1) == seen.region_name(1) == f"region 1 {seen.names[1]}"
    count = first + len(seen)
    assert seen.attention.shape[1:] == (explorer.model.network.encoder.config.num_attention_heads, count, count)
    assert np.allclose(seen.attention.sum(axis=3), 1, atol=1e-5), "all that this encoder reads is shown"
    for item in (1, first + 1):
        mean = with_item(asked, item).attention
        assert mean == pytest.approx(seen.attention[seen.best_step, :, item].mean(axis=0))
        one = with_item(asked, item, step=0, head=1).attention
        assert one == pytest.approx(seen.attention[0, 1, item]) and not np.allclose(one, mean)


def test_words_are_whole(explorer, record):
    """The attention of a word is the mean over its pieces, the attention to it their sum."""
    asked = ask(explorer, record["file_name"], "star rig")
    assert explorer.model.tokenizer.tokenize("rig") == ["r", "##i", "##g"]
    assert asked.before.words[1:3] == ("star", "rig")
    _, output = explorer.model.ask_with_output(Question(Path(record["file_name"]), "star rig"))
    pieces = output.encoded.attentions[0][0]
    maps = asked.before.attention[0]
    assert maps[:, 1, 2] == pytest.approx(pieces[:, 1, 2:5].sum(dim=1).numpy())
    assert maps[:, 2, 1] == pytest.approx(pieces[:, 2:5, 1].mean(dim=1).numpy())
    assert np.allclose(maps.sum(axis=2), 1, atol=1e-5)


def test_examples_are_photos_of_the_run_with_their_longest_texts(trained_run, explorer):
    texts: dict[str, list[str]] = {}
    for one in predictions_of(trained_run.path, "val_gt"):
        texts.setdefault(one["file_name"], []).append(one["text"])
    examples = dict(explorer.examples)
    assert 0 < len(examples) <= 12 and list(examples) == [Path(name) for name in texts][: len(examples)]
    assert all(len(text) == max(map(len, texts[str(file)])) for file, text in examples.items())


def test_a_run_that_names_files_that_are_no_images_does_not_show_them(trained_run, tmp_path, caplog):
    """The page would serve them: a stranger's run may name any file."""
    shutil.copytree(trained_run.path, tmp_path / "run")
    (tmp_path / "secret.png").write_text("a password")
    [predictions] = sorted((tmp_path / "run").glob("predictions_*.json"))[:1]
    shown = predictions_of(tmp_path / "run", predictions.stem.removeprefix("predictions_"))
    first, second = list(dict.fromkeys(record["file_name"] for record in shown))[:2]
    predictions.write_text(predictions.read_text().replace(first, str(tmp_path / "secret.png")))
    files = [file for file, _ in Explorer(e2e_vl.load(tmp_path / "run", device="cpu")).examples]
    assert files[0] == Path(second) and tmp_path / "secret.png" not in files
    assert "secret.png" in caplog.text


def test_long_texts_are_refused(explorer, record):
    with pytest.raises(UserError, match="The text has 501 characters; write at most 500"):
        ask(explorer, record["file_name"], "a" * 501)


def test_the_pixels_of_masked_regions_have_the_mean_colour_before_the_detector(explorer, asked, monkeypatch):
    seen: list[torch.Tensor] = []
    forward = explorer.model.network.detector.forward

    def watched(images, *args, **kwargs):
        seen.append(normalise_images(images, explorer.model.network.detector.config.input).pixels)
        return forward(images, *args, **kwargs)

    monkeypatch.setattr(explorer.model.network.detector, "forward", watched)
    explorer.ask(asked, asked.before.answer.question)
    masked = explorer.mask(asked, [2, 0])
    whole, covered = seen
    size = whole.shape[2:]
    inside = torch.zeros(size, dtype=torch.bool)
    for x1, y1, x2, y2 in mask_rectangles(asked.before.boxes[[0, 2]], size, "truncate").tolist():
        inside[y1:y2, x1:x2] = True
    assert 0 < inside.float().mean() < 1 and whole[0, :, inside].any()
    assert not covered[0, :, inside].any(), "0 is the mean colour"
    assert torch.equal(covered[0, :, ~inside], whole[0, :, ~inside])
    assert masked.masked == (0, 2) and masked.after.names == asked.before.names
    assert np.array_equal(masked.after.answer.boxes, asked.before.answer.boxes)


def test_masking_the_region_of_the_answer_changes_the_answer_and_showing_it_restores_it(explorer, asked):
    box = asked.before.answer.box
    row = asked.before.region_at(*(box[:2] + box[2:]) / 2, asked.shown_regions)
    masked = explorer.toggle(asked, row)
    assert masked.masked == (row,)
    assert masked.after.answer_boxes()[0][0].split(",")[0] in asked.before.names, "the detector's name of the region"
    assert abs(masked.after.answer.score - asked.before.answer.score) > 1e-4
    assert masked.shown is masked.after and masked.before is asked.before
    shown = explorer.toggle(masked, row)
    assert shown.masked == () and shown.after is None and shown.shown is asked.before
    assert explorer.ask(masked, "the star").masked == (), "another question begins anew"


def test_the_answer_needs_its_own_region_and_no_region_that_the_text_does_not_name(demo):
    moved, kept = [], []
    for file, text in demo.examples:
        asked = ask(demo, file, text)
        found = asked.before.answer
        if found.box is None:
            continue
        used = [found.box, *(one.box for one in found.phrases if one.box is not None)]
        free = [row for row, box in enumerate(found.boxes) if not np.isclose(box, used, atol=0.5).all(axis=1).any()]
        far = max(free, key=lambda row: np.abs(found.boxes[row] - found.box).sum())
        own = int(np.abs(found.boxes - found.box).sum(axis=1).argmin())
        for row, same in ((far, kept), (own, moved)):
            box = demo.mask(asked, [row]).after.answer.box
            same.append(box is not None and np.allclose(box, found.box))
    assert len(kept) > 8 and sum(kept) >= len(kept) - 1 and sum(moved) <= len(moved) / 2


def test_the_smallest_shown_region_around_a_point_is_found(asked):
    boxes = asked.before.answer.boxes
    rows = list(range(len(boxes)))
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    for x, y in ((boxes[:, :2] + boxes[:, 2:]) / 2).tolist():
        found = asked.before.region_at(x, y, rows)
        around = ((boxes[:, :2] <= (x, y)) & (boxes[:, 2:] > (x, y))).all(axis=1)
        assert areas[found] == areas[around].min()
    assert asked.before.region_at(-1, -1, rows) is None and asked.before.region_at(x, y, []) is None


@pytest.mark.parametrize(
    ("score", "text"),
    [(0.0, "0 %"), (0.004, "under 1 %"), (0.0051, "1 %"), (0.766, "77 %"), (0.9949, "99 %"), (0.9951, "over 99 %")],
)
def test_only_0_and_1_are_called_so(score, text):
    assert percent(score) == text and percent(1.0) == "100 %"


def test_answers_are_sentences(demo):
    image, _ = demo.examples[0]
    star, nothing, unsure = (
        inspection.sentences for inspection in ask(demo, image, "the purple star; the blue thing; the zebra").asked
    )
    assert star == ["star, over 99 %"]
    assert nothing == ["nothing fits, over 99 %"]
    assert unsure[0].endswith(" %, unsure") and "zebra" in unsure[1]


def test_an_unsure_answer_is_marked_in_the_picture(asked):
    """An answer without a box gets a dashed frame around the image."""
    nothing = dataclasses.replace(asked.before.answer, box=None, answer_boxes=[], top_answers=(("nothing fits", 0.5),))
    pictures = []
    for is_unsure in (False, True):
        prediction = msgspec.structs.replace(nothing.prediction, is_unsure=is_unsure)
        inspection = dataclasses.replace(asked.before, answer=dataclasses.replace(nothing, prediction=prediction))
        pictures.append(draw_answer(asked, inspection))
    on_edge = [(picture[:, 0] == PALETTE[0]).all(axis=1).mean() for picture in pictures]
    assert on_edge[0] == 0 and 0.4 < on_edge[1] < 0.6, "every other dash"


def inspection_of(asked: Session, boxes: list[list[float]], scores: list[float] | None) -> Inspection:
    """Return an inspection of regions whose last one is the answer."""
    boxes = np.array(boxes, dtype=np.float32)
    answer = dataclasses.replace(
        asked.before.answer, boxes=boxes, box=boxes[-1], answer_boxes=[("star 0.90", boxes[-1])]
    )
    scores = None if scores is None else np.array(scores, dtype=np.float32)
    return dataclasses.replace(asked.before, answer=answer, names=("star",) * len(boxes), scores=scores)


def test_weak_and_overlapping_regions_are_hidden_unless_asked_for(asked):
    boxes = [[0, 0, 10, 10], [0, 0, 10, 8], [0, 0, 10, 6], [20, 0, 30, 10], [40, 0, 50, 10]]
    seen = inspection_of(asked, boxes, [0.9, 0.8, 0.7, 0.19, 0.1])
    session = dataclasses.replace(asked, asked=(seen,))
    assert session.shown_regions == [0, 2, 4], "IoU 0.8, 0.6; the answer is always shown"
    assert dataclasses.replace(session, min_score=0.15).shown_regions == [0, 2, 3, 4]
    assert dataclasses.replace(session, shows_overlapping=True).shown_regions == [0, 1, 2, 4]
    assert dataclasses.replace(session, masked=(1,)).shown_regions == [0, 1, 2, 4]
    assert with_item(session, len(seen.words) + 3).shown_regions == [0, 2, 3, 4]
    given = dataclasses.replace(asked, asked=(inspection_of(asked, boxes, None),))
    assert given.shown_regions == [0, 1, 2, 3, 4], "without scores none is better"


def test_each_region_has_the_score_of_its_box(explorer, asked, record):
    _, output = explorer.model.ask_with_output(Question(Path(record["file_name"]), record["text"]))
    assert torch.equal(output.regions.boxes[0][1:], asked.before.boxes), "the whole image is before them"
    assert output.regions.scores[0][1:].tolist() == asked.before.scores.tolist()
    assert explorer.mask(asked, [0]).after.scores is asked.before.scores


def test_a_users_boxes_are_the_candidates(explorer, record, tmp_path):
    """With their names and scores, also after a region was masked; a message names the file alone."""
    image = read_image(Path(record["file_name"]))
    corners = [list(box) for box in record["candidate_boxes"][:3]]
    rows = []
    for (x1, y1, x2, y2), score in zip(corners, (0.5, 0.125, 0.75), strict=True):
        box = [x1, y1, x2 - x1, y2 - y1]
        image_id = Path(record["file_name"]).stem
        rows.append({"image_id": image_id, "bbox": box, "score": score, "category_name": f"cup {score}"})
    file = tmp_path / "boxes.json"
    file.write_text(json.dumps(rows))
    session = explorer.ask(Session(image).with_boxes(read_boxes(file)), record["text"])
    expected = explorer.model.ask(record["file_name"], record["text"], boxes=file)
    np.testing.assert_array_equal(session.before.answer.boxes, expected.boxes)
    assert session.before.answer.score == pytest.approx(expected.score, abs=1e-6)
    assert session.before.names == ("cup 0.5", "cup 0.125", "cup 0.75")
    assert session.before.scores.tolist() == [0.5, 0.125, 0.75]
    assert not np.array_equal(draw_regions(session), draw_regions(dataclasses.replace(session, boxes=None))), "names"
    masked = explorer.mask(session, [1]).after
    assert torch.equal(masked.boxes, session.before.boxes) and masked.names == session.before.names
    assert masked.answer.score != session.before.answer.score
    assert explorer.ask(session.with_boxes(None), record["text"]).before.names != session.before.names

    other = UserImage(dataclasses.replace(image.file, name="other.png"), image.size, image.pixels)
    file.write_text("[[1, 2, 3]]")
    for refused in (lambda: explorer.ask(session.with_image(other), "a star"), lambda: read_boxes(file)):
        with pytest.raises(UserError, match=r"^boxes\.json: "):
            refused()
    file.write_text("[[1, 2, 3000, 4]]")
    with pytest.raises(UserError, match=r"^boxes\.json: box 0 .* outside"):
        explorer.ask(session.with_boxes(read_boxes(file)), "a star")


def test_markers_are_in_the_row_of_words_only_if_asked_for(asked, record):
    words = [asked.before.words[item] for item in asked.shown_words]
    assert words == [*record["text"].split(), "[whole image]"]
    with_markers = dataclasses.replace(asked, shows_markers=True)
    assert [asked.before.words[item] for item in with_markers.shown_words] == list(asked.before.words)
    assert {"[CLS]", "[SEP]", "[END]"} <= set(asked.before.words)


def test_several_phrases_share_an_image_and_its_masked_regions(explorer, asked, record):
    session = explorer.ask(dataclasses.replace(asked, min_score=0.5), f"; {record['text']};a star\n the circle ;")
    questions = [inspection.answer.question for inspection in session.asked]
    assert questions == [record["text"], "a star", "the circle"] and session.min_score == 0.5
    assert np.allclose(session.before.attention, asked.before.attention, atol=1e-6)
    masked = explorer.mask(session, [1])
    second = explorer.select(masked, 1)
    assert second.before is session.asked[1] and second.after.answer.question == "a star" and second.masked == (1,)
    alone = explorer.mask(explorer.ask(asked, "a star"), [1])
    assert second.after.answer.score == pytest.approx(alone.after.answer.score)
    with pytest.raises(UserError, match="9 phrases; write at most 8"):
        explorer.ask(asked, "a star;" * 9)


def test_the_json_of_an_answer_is_that_which_it_saves(explorer, asked, tmp_path):
    assert Session().answers == ""
    asked.before.answer.save(tmp_path / "answer.json")
    assert f"{asked.answers}\n" == (tmp_path / "answer.json").read_text(encoding="utf-8")
    first, second = msgspec.json.decode(explorer.mask(asked, [1, 0]).answers)
    assert first == msgspec.json.decode(asked.answers) and second["masked"] == [0, 1]
    assert second["score"] != first["score"]


def test_pictures(explorer, asked):
    assert draw_regions(Session()) is None and draw_answer(asked, None) is None
    with pytest.raises(ValueError, match="no image yet"):
        explorer.ask(Session(), "the star")
    [(_, box)] = asked.before.answer_boxes()
    assert list(box) == pytest.approx(asked.before.answer.box.tolist())
    assert not np.array_equal(draw_regions(with_item(asked, 1)), draw_regions(asked))
    masked = explorer.toggle(asked, 0)
    boxes = masked.before.answer.boxes
    x, y = ((boxes[0, :2] + boxes[0, 2:]) / 2 * asked.image.scale).astype(int)
    assert draw_answer(masked, masked.after, masked.masked)[y, x].tolist() == [GREY] * 3
    assert draw_answer(masked, masked.before)[y, x].tolist() != [GREY] * 3


LXMERT = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
LXMERT |= {"l_layers": 2, "r_layers": 1, "x_layers": 1}
LAYERS = [
    *(f"language layer {layer} of 3: words to words" for layer in (1, 2, 3)),
    *(f"vision layer {layer} of 2: regions to regions" for layer in (1, 2)),
    "cross layer 1 of 1: words to regions, regions to words",
]


def test_layers_have_the_names_of_their_graphs(trained_run, record, tmp_path):
    """An untrained LXMERT; where two graphs share a map, each shows its own part."""
    config = replaced(trained_run.config, encoder={"name": "lxmert", "config": LXMERT, "weights": None})
    tokenizer = load_tokenizer(str(trained_run.path / "model" / "tokenizer"))
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    save_model(tmp_path / "run" / "model", config, model, tokenizer)
    explorer = Explorer(e2e_vl.load(tmp_path / "run", device="cpu"))
    asked = ask(explorer, record["file_name"], record["text"])
    seen, count = asked.before, len(asked.before.words)
    assert list(seen.step_names) == LAYERS and len(seen.attention) == len(LAYERS)
    assert {one.partition(" ")[0] for one in LAYERS} == set(explorer.model.network.encoder.attention_graphs)
    assert seen.best_step == len(LAYERS) - 1
    places = {"words": slice(0, count), "regions": slice(count, None)}
    for name, maps in zip(LAYERS, seen.attention, strict=True):
        for query, key in itertools.product(places, places):
            assert maps[:, places[query], places[key]].any() == (f"{query} to {key}" in name)
        shares = maps.sum(axis=2)
        assert np.allclose(shares[shares > 0], 1, atol=1e-5)
    masked = explorer.mask(with_item(asked, count), [0])
    assert masked.after.step_names == seen.step_names and not np.allclose(masked.after.attention, seen.attention)


def test_a_run_that_answers_questions(vqa_run):
    explorer = Explorer(e2e_vl.load(vqa_run, device="cpu"))
    record = predictions_of(vqa_run)[0]
    asked = ask(explorer, record["file_name"], record["text"])
    assert asked.before.answer.text in explorer.model.network.task.answer_vocabulary.answers and len(asked.before) > 1
    assert draw_answer(asked, asked.before) is not None and draw_regions(with_item(asked, 1)) is not None
    masked = explorer.mask(asked, range(len(asked.before)))
    assert masked.after.answer.text and masked.after.answer.score != asked.before.answer.score


def test_the_phrases_of_a_run_that_grounds_them(phrase_run, record):
    explorer = Explorer(e2e_vl.load(phrase_run, device="cpu"))
    grounding = ask(explorer, record["file_name"], "big red star")
    seen = grounding.before
    phrases, shown = seen.answer.phrases, seen.answer.shown_phrases()
    [(label, box)] = seen.answer_boxes()
    assert label != "answer" and list(box) == pytest.approx(seen.answer.box.tolist()) and shown
    assert shown_on_page(grounding)["boxes"].count("\n") == len(phrases) == 3
    assert (draw_answer(grounding, seen) == PALETTE[1]).all(axis=2).sum() > 200
    masked = explorer.mask(grounding, [0]).after
    assert [one.text for one in masked.answer.phrases] == [one.text for one in phrases] == ["big", "red", "star"]


@pytest.mark.parametrize("features_of", ["final", "proposal"])
def test_nothing_changes_when_nothing_is_masked(trained_run, record, features_of):
    """The same regions are given the second time, so they must have the same features."""
    model = e2e_vl.load(trained_run.path, device="cpu")
    config = model.network.detector.config
    heads = msgspec.structs.replace(config.roi_heads, features_of=features_of)
    model.network.detector.config = msgspec.structs.replace(config, roi_heads=heads)
    explorer, image = Explorer(model), read_image(Path(record["file_name"]))
    before = explorer.ask(Session(image), record["text"]).before
    again = explorer.inspect(image, record["text"], before=before)
    assert again.answer.score == pytest.approx(before.answer.score, abs=1e-6)
    assert np.allclose(again.attention, before.attention, atol=1e-6) and again.names == before.names
    assert np.array_equal(again.answer.boxes, before.answer.boxes)
    found, _ = model.ask_with_output(Question(image.file, record["text"]))
    describes_others = abs(found.score - before.answer.score) > 1e-6
    assert describes_others == ("FEATURES_OF" in explorer.note) == (features_of == "proposal")

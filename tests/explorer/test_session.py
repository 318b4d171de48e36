"""What the explorer's page shows: answers, attention of words and regions, and answers when regions are hidden."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

import e2e_vl
from detector.errors import UserError
from detector.images import mask_rectangles
from e2e_vl.drawing import PALETTE
from e2e_vl.explorer.session import (
    GREY,
    LONGEST_TEXT,
    Explorer,
    Limits,
    Session,
    draw_pointed,
    draw_regions,
    read_photo,
)
from e2e_vl.explorer.web_page import _values
from e2e_vl.predictions import GroundedPhrase
from e2e_vl.run.build import build_model
from e2e_vl.run.checkpoint import save_model
from e2e_vl.samples import Question
from e2e_vl.text import load_tokenizer
from tests.weights.starts import replaced

pytestmark = pytest.mark.usefixtures("on_cpu")

PHRASES_ROW = 4  # of the page's values


@pytest.fixture(scope="module")
def record(trained_run) -> dict:
    """A prediction of the evaluation with the detector's predicted boxes."""
    return json.loads((trained_run.path / "predictions_val_online.json").read_text("utf-8"))[0]


@pytest.fixture(scope="module")
def explorer(trained_run) -> Explorer:
    return Explorer(e2e_vl.load(trained_run.path, device="cpu"))


@pytest.fixture(scope="module")
def asked(explorer, record) -> Session:
    photo = read_photo(Path(record["file_name"]), Limits())
    return explorer.ask(Session(photo), record["text"])


def with_item(session: Session, item: int, **more) -> Session:
    return dataclasses.replace(session, item=item, **more)


def test_the_answer_is_the_one_of_the_evaluation(explorer, asked, record):
    assert asked.before.answer.box == pytest.approx(record["box"], abs=1e-3)
    assert asked.before.answer.score == pytest.approx(record["score"], abs=1e-5)
    assert explorer.note == ""
    assert asked.after is None and asked.hidden == () and asked.attention is None
    assert set(asked.before.names) == set(asked.before.answer.box_names) and len(asked.before) > 2


def test_attention_of_a_word_and_of_a_region(explorer, asked, record):
    seen = asked.before
    pieces = explorer.model.tokenizer.tokenize(record["text"])
    assert list(seen.words[1 : 1 + len(pieces)]) == pieces
    count = len(seen.words) + len(seen)
    encoder = explorer.model.settings.encoder
    assert seen.attention.shape[2:] == (count, count)
    assert seen.attention.shape[1] == seen.num_heads == explorer.model.network.encoder.config.num_attention_heads, (
        encoder
    )
    assert np.allclose(seen.attention.sum(axis=3), 1, atol=1e-5), "all that this encoder reads is shown"
    for item in (1, len(seen.words) + 1):
        mean = with_item(asked, item).attention
        assert mean == pytest.approx(seen.attention[seen.best_step, :, item].mean(axis=0))
        one = with_item(asked, item, step=0, head=1).attention
        assert one == pytest.approx(seen.attention[0, 1, item]) and not np.allclose(one, mean)


def test_items_have_the_names_of_their_words_and_regions(asked):
    seen, first = asked.before, len(asked.before.words)
    assert seen.item_name(1) == f"2: {seen.words[1]}"
    for row in range(len(seen)):
        assert seen.item_name(first + row) == seen.region_name(row) == f"region {row} {seen.names[row]}"


def test_nothing_changes_when_nothing_is_hidden(explorer, asked):
    """The same regions are given the second time, so they must have the same features."""
    again = explorer.inspect(asked.photo, asked.before.answer.text, asked.before, ())
    assert again.answer.score == pytest.approx(asked.before.answer.score, abs=1e-6)
    assert np.allclose(again.attention, asked.before.attention, atol=1e-6)
    assert np.array_equal(again.answer.boxes, asked.before.answer.boxes)


def test_the_pixels_of_hidden_regions_have_the_mean_colour_before_the_detector(explorer, asked, monkeypatch):
    seen: list[torch.Tensor] = []
    forward = explorer.model.network.detector.forward

    def watched(images, *args, **kwargs):
        seen.append(images.pixels.clone())
        return forward(images, *args, **kwargs)

    monkeypatch.setattr(explorer.model.network.detector, "forward", watched)
    explorer.ask(asked, asked.before.answer.text)
    hidden = explorer.hide(asked, [2, 0])
    whole, covered = seen
    size = whole.shape[2:]
    inside = torch.zeros(size, dtype=torch.bool)
    for x1, y1, x2, y2 in mask_rectangles(asked.before.boxes[[0, 2]], size, "truncate").tolist():
        inside[y1:y2, x1:x2] = True
    assert 0 < inside.float().mean() < 1 and whole[0, :, inside].any()
    assert not covered[0, :, inside].any(), "0 is the mean colour"
    assert torch.equal(covered[0, :, ~inside], whole[0, :, ~inside])
    assert hidden.hidden == (0, 2)
    assert np.array_equal(hidden.after.answer.boxes, asked.before.answer.boxes)
    assert hidden.after.names == asked.before.names


def test_hiding_the_region_of_the_answer_changes_the_answer_and_showing_it_restores_it(explorer, asked):
    box = asked.before.answer.box
    row = asked.before.region_at(*(box[:2] + box[2:]) / 2)
    hidden = explorer.toggle(asked, row)
    assert hidden.hidden == (row,)
    assert hidden.after.shown_boxes()[0][0].split()[0] in asked.before.names, "the detector's name of the region"
    assert abs(hidden.after.answer.score - asked.before.answer.score) > 1e-4
    assert hidden.shown is hidden.after and hidden.before is asked.before
    shown = explorer.toggle(hidden, row)
    assert shown.hidden == () and shown.after is None and shown.shown is asked.before
    assert explorer.ask(hidden, "the star").hidden == (), "another question begins anew"


def test_the_smallest_region_around_a_point_is_found(asked):
    boxes = asked.before.answer.boxes
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    for x, y in ((boxes[:, :2] + boxes[:, 2:]) / 2).tolist():
        found = asked.before.region_at(x, y)
        around = ((boxes[:, :2] <= (x, y)) & (boxes[:, 2:] > (x, y))).all(axis=1)
        assert areas[found] == areas[around].min()
    assert asked.before.region_at(-1, -1) is None


def test_pictures(explorer, asked):
    photo, seen = asked.photo, asked.before
    plain = draw_regions(asked)
    assert draw_regions(Session()) is None and draw_pointed(asked, None) is None
    assert plain.shape[0] >= photo.pixels.shape[0] and plain.shape[1] >= photo.pixels.shape[1]
    [(_, box)] = seen.shown_boxes()
    assert box == pytest.approx(seen.answer.box.tolist())
    corner = tuple(np.array(box[:2]) * photo.scale)
    assert corner[0] <= photo.pixels.shape[1] and corner[1] <= photo.pixels.shape[0]
    coloured = draw_regions(with_item(asked, 1))
    assert not np.array_equal(coloured, plain)
    hidden = explorer.toggle(asked, 0)
    x, y = ((hidden.before.answer.boxes[0, :2] + hidden.before.answer.boxes[0, 2:]) / 2 * photo.scale).astype(int)
    assert draw_pointed(hidden, hidden.after, hidden.hidden)[y, x].tolist() == [GREY] * 3
    assert draw_pointed(hidden, hidden.before)[y, x].tolist() != [GREY] * 3


@pytest.mark.parametrize("size", [(12, 300), (300, 12), (1600, 1200), (9, 7)])
def test_photos_of_any_size(explorer, asked, size, tmp_path):
    path = tmp_path / "photo.png"
    Image.effect_noise(size, 60).convert("RGB").save(path)
    session = explorer.ask(Session(read_photo(path, Limits())), "the star")
    assert session.photo.size == size[::-1]
    hidden = with_item(explorer.toggle(session, 0), len(session.before.words))
    width, height = size
    assert (hidden.before.answer.boxes <= np.array([width, height, width, height]) + 1e-3).all()
    for picture in (draw_regions(hidden), draw_pointed(hidden, hidden.after, hidden.hidden)):
        assert picture.shape[0] >= session.photo.pixels.shape[0] and picture.shape[1] >= session.photo.pixels.shape[1]


def test_what_cannot_be_asked_is_said_in_a_sentence(explorer, asked):
    with pytest.raises(ValueError, match="no photo yet"):
        explorer.ask(Session(), "the star")
    with pytest.raises(ValueError, match="text is empty"):
        explorer.ask(asked, "  ")
    with pytest.raises(ValueError, match=f"at most {LONGEST_TEXT}"):
        explorer.ask(asked, "a" * (LONGEST_TEXT + 1))
    with pytest.raises(ValueError, match="Nothing was asked yet"):
        explorer.hide(Session(asked.photo), [0])


def test_a_pretraining_run_fills_in_a_masked_word(pretraining_run):
    explorer = Explorer(e2e_vl.load(pretraining_run, device="cpu"))
    records = json.loads(next(pretraining_run.glob("predictions_val_*.json")).read_text("utf-8"))
    asked = explorer.ask(Session(read_photo(Path(records[0]["file_name"]), Limits())), "a [MASK] circle")
    assert asked.before.answer.answer and "[MASK]" in asked.before.words
    assert len(explorer.hide(asked, [0]).after) == len(asked.before)


SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
ENCODERS = {
    "visual_bert": ({"num_hidden_layers": 2}, ["joint:0", "joint:1"]),
    "lxmert": (
        {"l_layers": 2, "r_layers": 1, "x_layers": 1},
        [
            *(f"language:{layer} (words to words)" for layer in range(3)),
            *(f"vision:{layer} (regions to regions)" for layer in range(2)),
            "cross:0 (words to regions, regions to words)",
        ],
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_layers_are_named_as_in_an_analysis(name, trained_run, record, tmp_path):
    """Untrained encoders; where two graphs share a map, each shows its own part."""
    sizes, names = ENCODERS[name]
    config = replaced(trained_run.config, encoder={"name": name, "config": SMALL | sizes, "weights": None})
    tokenizer = load_tokenizer(str(trained_run.path / "model" / "tokenizer"))
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    save_model(tmp_path / "run" / "model", config, model, tokenizer)
    explorer = Explorer(e2e_vl.load(tmp_path / "run", device="cpu"))
    asked = explorer.ask(Session(read_photo(Path(record["file_name"]), Limits())), record["text"])
    seen, count = asked.before, len(asked.before.words)
    assert list(seen.step_names) == names and len(seen.attention) == len(names)
    assert {one.partition(":")[0] for one in names} == set(explorer.model.network.encoder.attention_graphs)
    assert seen.best_step == len(names) - 1
    for step, said in enumerate(names):
        maps = seen.attention[step]
        blocks = {
            "words to words": maps[:, :count, :count],
            "words to regions": maps[:, :count, count:],
            "regions to words": maps[:, count:, :count],
            "regions to regions": maps[:, count:, count:],
        }
        assert {block for block, part in blocks.items() if part.any()} == {
            block for block in blocks if block in said or "(" not in said
        }
        shares = maps.sum(axis=2)
        assert np.allclose(shares[shares > 0], 1, atol=1e-5)
    hidden = explorer.hide(with_item(asked, count), [0])
    assert hidden.after.step_names == seen.step_names and not np.allclose(hidden.after.attention, seen.attention)


def test_a_run_that_answers_questions(vqa_run):
    explorer = Explorer(e2e_vl.load(vqa_run, device="cpu"))
    record = json.loads((vqa_run / "predictions_val_gt.json").read_text("utf-8"))[0]
    asked = explorer.ask(Session(read_photo(Path(record["file_name"]), Limits())), record["text"])
    assert asked.before.answer.answer in explorer.model.network.task.answers and len(asked.before) > 1
    assert asked.before.step_names[0] == "joint:0"
    assert draw_pointed(asked, asked.before) is not None
    assert draw_regions(with_item(asked, 1)) is not None
    hidden = explorer.hide(asked, range(len(asked.before)))
    assert hidden.after.answer.answer and hidden.after.answer.score != asked.before.answer.score


def test_the_phrases_of_a_run_that_grounds_them(phrase_run, record):
    explorer = Explorer(e2e_vl.load(phrase_run, device="cpu"))
    asked = explorer.ask(Session(read_photo(Path(record["file_name"]), Limits())), "big red star")
    seen = asked.before
    phrases, shown = seen.answer.phrases, seen.answer.shown_phrases()
    assert [one.text for one in phrases] == ["big", "red", "star"]
    assert all(np.isclose(seen.answer.boxes, one.box, atol=0.1).all(axis=1).any() for one in phrases)
    [(label, box), *others] = seen.shown_boxes()
    assert label != "answer" and box == pytest.approx(seen.answer.box.tolist())
    assert shown and others == [(f"{one.text} {one.score:.2f}", list(one.box)) for one in shown]
    lines = said_on_page(asked)[PHRASES_ROW]["value"].split("\n")
    assert lines == [
        f"{one.text}: {', '.join(f'{side:.1f}' for side in one.box)}  ({one.score:.2f})" for one in phrases
    ]
    assert said_on_page(asked)[PHRASES_ROW]["visible"]
    assert (draw_pointed(asked, seen) == PALETTE[1]).all(axis=2).sum() > 200
    hidden = explorer.hide(asked, [0]).after
    assert [one.text for one in hidden.answer.phrases] == ["big", "red", "star"]


def said_on_page(session: Session) -> list:
    """What the page's components show; without gradio, whose updates are their settings here."""
    return _values(SimpleNamespace(update=dict), session)


def test_phrases_are_drawn_in_other_colours_than_the_answer_and_dashed_where_they_are_unsure(asked):
    assert said_on_page(asked)[PHRASES_ROW] == {"value": "", "visible": False}, "a run without phrases"
    here, there = tuple(asked.before.answer.box.tolist()), (1.0, 2.0, 60.0, 50.0)
    pixels = {}
    for score in (0.9, 0.4):
        found = [GroundedPhrase("star", (0, 4), here, 0.9), GroundedPhrase("circle", (5, 11), there, score)]
        prediction = msgspec.structs.replace(asked.before.answer.prediction, grounded=tuple(found))
        look = dataclasses.replace(asked.before, answer=dataclasses.replace(asked.before.answer, prediction=prediction))
        label = "circle 0.90" if score == 0.9 else "circle 0.40, unsure"
        assert look.shown_boxes() == [asked.before.shown_boxes()[0], (label, list(there))], (
            "the answer's box is not named twice"
        )
        drawn = draw_pointed(asked, look)
        assert (drawn == PALETTE[0]).all(axis=2).sum() > 200
        scale = drawn.shape[1] / asked.photo.size[1]
        left, top, bottom = (round(side * scale) for side in (1, 2, 50))
        pixels[score] = (drawn[top:bottom, left] == PALETTE[1]).all(axis=1).mean()
    assert pixels[0.9] > 0.7 and pixels[0.4] < 0.7 * pixels[0.9], "the left side of the box"
    plain = draw_pointed(asked, asked.before)
    assert not (plain == PALETTE[1]).all(axis=2).any()


def test_a_detector_that_describes_proposals_is_asked_in_one_way_before_and_after(trained_run, record):
    model = e2e_vl.load(trained_run.path, device="cpu")
    config = model.network.detector.config
    heads = msgspec.structs.replace(config.roi_heads, features_of="proposal")
    model.network.detector.config = msgspec.structs.replace(config, roi_heads=heads)
    explorer, photo = Explorer(model), read_photo(Path(record["file_name"]), Limits())
    before = explorer.ask(Session(photo), record["text"]).before
    again = explorer.inspect(photo, record["text"], before, ())
    assert again.answer.score == pytest.approx(before.answer.score, abs=1e-6)
    assert np.allclose(again.attention, before.attention, atol=1e-6) and again.names == before.names
    found, _ = model.look(Question(photo.file, record["text"]))
    assert abs(found.score - before.answer.score) > 1e-6, "the detector itself describes other boxes"
    assert "FEATURES_OF" in explorer.note


def test_an_encoder_without_attention_is_refused(explorer, monkeypatch):
    encoder = type(explorer.model.network.encoder)
    monkeypatch.setattr(encoder, "attention_graphs", property(lambda self: {}))
    with pytest.raises(ValueError, match="has no attention to show"):
        Explorer(explorer.model)


# Photos that visitors give


def write(path: Path, image: Image.Image, kind: str, **more) -> Path:
    stream = io.BytesIO()
    image.save(stream, kind, **more)
    path.write_bytes(stream.getvalue())
    return path


def test_jpeg_and_png_are_accepted_whatever_their_name(tmp_path):
    picture = Image.effect_noise((40, 20), 50).convert("RGB")
    for kind in ("JPEG", "PNG"):
        photo = read_photo(write(tmp_path / "photo.txt", picture, kind), Limits())
        assert photo.size == (20, 40)
        assert photo.pixels.dtype == np.uint8 and photo.pixels.shape[1] == 2 * photo.pixels.shape[0]
        assert photo.scale == pytest.approx([photo.pixels.shape[1] / 40] * 2)


def test_a_photo_is_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = write(tmp_path / "photo.jpg", Image.new("RGB", (40, 20)), "JPEG", exif=exif)
    assert read_photo(path, Limits()).size == (40, 20)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "WEBP"])
def test_other_formats_are_refused_whatever_their_name(tmp_path, kind):
    path = write(tmp_path / "photo.jpg", Image.new("RGB", (40, 20)), kind)
    with pytest.raises(ValueError, match=r"photo\.jpg is neither a JPEG nor a PNG file; convert it first\."):
        read_photo(path, Limits())


def test_large_and_damaged_photos_are_refused(tmp_path):
    path = write(tmp_path / "photo.png", Image.effect_noise((300, 200), 50), "PNG")
    with pytest.raises(ValueError, match=r"photo\.png has 0\.\d MB; the limit is 0\.01 MB"):
        read_photo(path, Limits(megabytes=0.01))
    with pytest.raises(ValueError, match=r"photo\.png has 300 x 200 pixels; the limit is 0.059999 megapixels"):
        read_photo(path, Limits(megapixels=0.059999))
    assert read_photo(path, Limits(megapixels=0.06)).size == (200, 300)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"photo\.png"):
        read_photo(path, Limits())
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="neither a JPEG nor a PNG"):
        read_photo(path, Limits())

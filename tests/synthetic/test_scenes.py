from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from torchvision.ops import box_iou

from e2e_vl.synthetic import scenes as drawing
from e2e_vl.synthetic.config import COLOURS, TEXTURES, RenderingConfig, SceneConfig
from e2e_vl.synthetic.scenes import Scene, degrade, draw_scene

CONFIG = SceneConfig()


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [draw_scene(CONFIG, np.random.default_rng([7, i])) for i in range(60)]


def test_number_and_sizes_of_objects(scenes):
    counts = {len(scene.objects) for scene in scenes}
    assert counts == set(range(CONFIG.min_objects, CONFIG.max_objects + 1))
    for scene in scenes:
        for item in scene.objects:
            low, high = CONFIG.small if item.appearance.size == "small" else CONFIG.big
            assert low <= item.extent <= high
            # What can be seen never takes a big object for a small one.
            assert (item.visible_extent > (CONFIG.small[1] + CONFIG.big[0]) / 2 - 2) == (item.appearance.size == "big")


def test_later_objects_hide_a_part_of_earlier_ones(scenes):
    """No two boxes overlap so much that an IoU of one half would not tell them apart."""
    occluded = 0
    for scene in scenes:
        boxes = torch.tensor([item.box for item in scene.objects]).double()
        assert box_iou(boxes, boxes).fill_diagonal_(0).max() <= drawing.MAX_BOX_IOU
        for i, item in enumerate(scene.objects):
            in_front = np.zeros_like(item.full)
            for later in scene.objects[i + 1 :]:
                in_front |= later.full
            assert (item.visible == (item.full & ~in_front)).all()
            share = item.visible.sum() / item.full.sum()
            assert share >= 0.65
            occluded += share < 0.97
    assert 0.15 <= occluded / sum(len(scene.objects) for scene in scenes) <= 0.6


def test_pixels_show_the_annotated_colour(scenes):
    """The median of a plain object's inner pixels is nearer to its own colour than to any other, after JPEG too."""
    names = list(COLOURS)
    palette = np.array([drawing.RGB[name] for name in names], float)
    seen = 0
    for scene in scenes:
        encoded = cv2.imencode(".jpg", scene.image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])[1]
        image = cv2.imdecode(encoded, cv2.IMREAD_COLOR)[..., ::-1]
        for item in scene.objects:
            inner = cv2.erode(item.visible.view(np.uint8), np.ones((5, 5), np.uint8)) > 0
            if item.appearance.texture != "plain" or inner.sum() < 8:
                continue
            colour = np.median(image[inner], axis=0)
            assert names[np.argmin(np.linalg.norm(palette - colour, axis=1))] == item.appearance.colour
            background = np.median(image[~np.any([other.full for other in scene.objects], axis=0)], axis=0)
            assert np.linalg.norm(colour - background) > 60
            seen += 1
    assert seen > 100


def test_stripes_and_dots_are_visible():
    spreads = {}
    for texture in TEXTURES:
        image = np.full((40, 40, 3), 120, np.float32)
        patch = drawing.cover(drawing.outline("square", 30, 0.0), (20, 20))
        drawing.paint(image, patch, "blue", texture, np.random.default_rng(0))
        spreads[texture] = image[10:30, 10:30].std(axis=(0, 1)).mean()
    assert spreads["striped"] > 5 * spreads["plain"]
    assert spreads["dotted"] > 5 * spreads["plain"]


def test_rendering_blurs_pales_brightens_and_adds_noise(scenes):
    def render(**settings: float) -> np.ndarray:
        return degrade(image, RenderingConfig(**settings), np.random.default_rng(3)).astype(float)

    image = scenes[0].image
    assert (render() == image).all()
    blurred = render(blur=1.0)
    assert np.abs(np.diff(blurred, axis=1)).mean() < 0.6 * np.abs(np.diff(image.astype(float), axis=1)).mean()
    assert blurred.mean() == pytest.approx(image.mean(), abs=0.5)
    pale = render(contrast=0.3)
    assert pale.std() == pytest.approx(0.3 * image.std(), rel=0.02)
    assert (render(contrast=0.3, brightness=40) - pale == 40).all()
    noise = render(contrast=0.3, noise=8) - pale
    assert noise.std() == pytest.approx(8, rel=0.05)
    assert noise.mean() == pytest.approx(0, abs=0.2)


def test_a_palette_changes_the_colour_of_its_objects_alone(scenes):
    scene = next(scene for scene in scenes if "red" in {item.appearance.colour for item in scene.objects})
    number = scenes.index(scene)
    other = draw_scene(CONFIG, np.random.default_rng([7, number]), {"red": (20, 220, 210)})
    red = np.any([item.visible for item in scene.objects if item.appearance.colour == "red"], axis=0)
    grown = cv2.dilate(red.view(np.uint8), np.ones((3, 3), np.uint8)) > 0
    changed = (other.image != scene.image).any(axis=2)
    assert changed[red].all()
    assert not changed[~grown].any()
    for item, same in zip(scene.objects, other.objects, strict=True):
        assert (item.appearance, item.box) == (same.appearance, same.box)


def test_impossible_settings_are_named():
    with pytest.raises(ValueError, match="small"):
        SceneConfig(small=(16, 30))
    config = SceneConfig(min_objects=40, max_objects=40, min_side=64, max_side=64)
    with pytest.raises(ValueError, match="40 objects do not fit"):
        draw_scene(config, np.random.default_rng(0))

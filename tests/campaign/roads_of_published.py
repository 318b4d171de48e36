"""Roads of features that other projects published."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path

import h5py
import numpy as np
import torch

from e2e_vl.data.features import RegionFeatures
from e2e_vl.data.published_features import BanFeatures, DetectronFeatures, PythiaFeatures, read_image_sizes
from tests.campaign.roads_of_files import Road, check_boxes, check_size, require

FOLDER = "published"  # below the drawn files
IMAGES, REGIONS = 3, 4


def draw_published(root: Path) -> None:
    folder = root / FOLDER
    (folder / "pythia").mkdir(parents=True)
    rng = np.random.default_rng(0)
    features = rng.standard_normal((IMAGES, REGIONS, 5)).astype(np.float32)
    starts = rng.uniform(0, 20, (IMAGES, REGIONS, 2))
    boxes = np.concatenate([starts, starts + rng.uniform(1, 20, starts.shape)], axis=2).astype(np.float32)
    for image_id, values in enumerate(features):
        np.save(folder / "pythia" / f"COCO_val2014_{image_id:012}.npy", values)
    sizes = [{"id": image_id, "width": 60, "height": 40} for image_id in range(IMAGES)]
    (folder / "sizes.json").write_text(json.dumps({"images": sizes}))
    for name, to_value in (("tensors", torch.from_numpy), ("arrays", np.asarray)):
        content = {
            f"dev-{row}-0-img0.png.npz": tuple(map(to_value, (features[row], boxes[row], np.full(REGIONS, 0.5))))
            for row in range(IMAGES)
        }
        torch.save(content, folder / f"{name}.th", _use_new_zipfile_serialization=name == "tensors")
    shares = boxes / np.array([60, 40, 60, 40], dtype=np.float32)
    with h5py.File(folder / "ban.hdf5", "w") as file:
        file["image_features"], file["image_bb"] = features.reshape(-1, 5), boxes.reshape(-1, 4)
        file["spatial_features"] = np.concatenate([shares, shares[..., 2:] - shares[..., :2]], axis=2).reshape(-1, 6)
        file["pos_boxes"] = np.array([[row * REGIONS, (row + 1) * REGIONS] for row in range(IMAGES)])
    (folder / "ids.pkl").write_bytes(pickle.dumps({100 + row: row for row in range(IMAGES)}, protocol=2))


def published_roads() -> list[Road]:
    return list(_roads())


def _roads() -> Iterator[Road]:
    yield Road("features of Pythia", None, _pythia, is_binary=True)
    for name in ("tensors", "arrays"):
        yield Road(
            f"features of Detectron, {name}", None, lambda root, name=name: _detectron(root, name), is_binary=True
        )
    unheard = (f"{FOLDER}/ban.hdf5",)
    yield Road("features of BAN", None, _ban, is_binary=True, unheard=unheard)


def _pythia(root: Path) -> None:
    sizes = read_image_sizes([root / FOLDER / "sizes.json"])
    for size in sizes.values():
        check_size(size)
    _check(PythiaFeatures(root / FOLDER / "pythia", sizes))


def _detectron(root: Path, name: str) -> None:
    _check(DetectronFeatures([root / FOLDER / f"{name}.th"]))


def _ban(root: Path) -> None:
    _check(BanFeatures(root / FOLDER / "ban.hdf5", root / FOLDER / "ids.pkl"))


def _check(found: Iterable[RegionFeatures]) -> None:
    for record in found:
        check_boxes(record.boxes, points=True)
        check_size(record.image_size)
        require(bool(record.image_id), "an image without an id")
        require(np.isfinite(record.features).all(), "a feature is not finite")

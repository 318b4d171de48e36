"""Published weights by name: URLs, configs, checksums and downloads.

Names start with the publisher: `torchvision/...`, `detectron2/...` (as in its model zoo) and `bottom-up-attention/...`.
Detectron2's own addresses (`detectron2://ImageNetPretrained/MSRA/R-50.pkl`) and full URLs are also accepted.

Sources: torchvision's URLs are in its weights enums, and its file names end with the first 8 hexadecimal digits of the
file's sha256. Detectron2's are in `detectron2/model_zoo/model_zoo.py` and MODEL_ZOO.md, and the file names of its
detectors end with the first 6 digits of the file's md5. Its ImageNet models and the files of bottom-up attention have
no published checksum. The two full sha256 are from public records of the same files.

Licences: Detectron2's files have CC BY-SA 3.0. The licences of torchvision (BSD-3-Clause) and of the two ports of
bottom-up attention (Apache-2.0) cover only their code; torchvision adds that the terms of COCO or ImageNet may apply.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import http.client
import re
from pathlib import Path
from typing import Any

from filelock import FileLock

from detector.config import NORM_EPS
from detector.errors import MissingFileError, UserError, first_line, reading, user_path
from detector.io import atomic_file

PUBLISHED = Path(__file__).with_name("published")  # Detectron2 YAML files
CLASS_LISTS = Path(__file__).with_name("class_names")  # text files with one class name per line

TORCHVISION = "https://download.pytorch.org/models/"
DETECTRON2 = "https://dl.fbaipublicfiles.com/detectron2/"
UNC = "https://nlp.cs.unc.edu/models/"  # reported offline in 2020; public copies have the same file names
MILVLG = "https://awma1-my.sharepoint.com/:u:/g/personal/yuz_l0_tn/"

IMAGENET_CONFIGS = {
    "resnet50": "torchvision_R_50_C4",
    "resnet101": "torchvision_R_101_C4",
    "mobilenet_v3_large": "torchvision_mobilenet_v3_large_fpn",
}


@dataclasses.dataclass(frozen=True)
class PublishedWeights:
    """A published weights file."""

    name: str
    address: str  # URL
    file: str  # file name in the cache
    config: str  # stem of the YAML file in detector/published
    checksum: str = ""  # "sha256:" or "md5:" and the known first hexadecimal digits; "": unknown
    class_names: str = ""  # stem of a file in detector/class_names; "": unknown
    expect: str = "all"  # part of the detector in the file, see `detector.checkpoint.load_checkpoint`
    norm_eps: float = NORM_EPS  # epsilon of the frozen batch norms that the weights were trained with
    rounding: str = "detectron2"  # see `detector.images.ResizeRule`

    @property
    def config_path(self) -> Path:
        """Path of the config, which is installed with this package."""
        return PUBLISHED / f"{self.config}.yaml"

    def read_class_names(self) -> tuple[str, ...] | None:
        """Return the names of classes 0 .. K-1, or None if they are unknown.

        In "coco_ids", class c has the COCO id c + 1, and the ten unused ids are named "N/A", as in torchvision.
        """
        if not self.class_names:
            return None
        return tuple((CLASS_LISTS / f"{self.class_names}.txt").read_text(encoding="utf-8").splitlines())


def _torchvision(name: str, file: str, config: str, **fields: Any) -> PublishedWeights:
    digits = file.removesuffix(".pth").rpartition("-")[2]
    fields = {"checksum": f"sha256:{digits}", "rounding": "torchvision", **fields}
    return PublishedWeights(f"torchvision/{name}", TORCHVISION + file, file, config, **fields)


def _imagenet(name: str, file: str, **fields: Any) -> PublishedWeights:
    return _torchvision(name, file, IMAGENET_CONFIGS[name.partition("-")[0]], expect="backbone", **fields)


def _zoo(name: str, number: int, digits: str, config: str, **fields: Any) -> PublishedWeights:
    """Make the entry of a detector in Detectron2's model zoo; `digits` are part of its file name."""
    name = f"COCO-Detection/{name}"
    file = f"model_final_{digits}.pkl"
    fields = {"checksum": f"md5:{digits}", "class_names": "coco", **fields}
    return PublishedWeights(f"detectron2/{name}", f"{DETECTRON2}{name}/{number}/{file}", file, config, **fields)


def _zoo_backbone(name: str, config: str) -> PublishedWeights:
    address = f"{DETECTRON2}ImageNetPretrained/{name}.pkl"
    file = f"detectron2-{name.replace('/', '-')}.pkl"  # the original file name, such as R-50.pkl, is not unique
    return PublishedWeights(f"detectron2/ImageNetPretrained/{name}", address, file, config, expect="backbone")


def _port(name: str, address: str, config: str, suffix: str) -> PublishedWeights:
    return PublishedWeights(f"bottom-up-attention/{name}", address, f"{name}{suffix}", config)


PUBLISHED_WEIGHTS: tuple[PublishedWeights, ...] = (
    _torchvision(
        "fasterrcnn_resnet50_fpn-coco",
        "fasterrcnn_resnet50_fpn_coco-258fb6c6.pth",
        "torchvision_R_50_FPN",
        class_names="coco_ids",
        norm_eps=0.0,
    ),
    _torchvision(
        "fasterrcnn_resnet50_fpn_v2-coco",
        "fasterrcnn_resnet50_fpn_v2_coco-dd69338a.pth",
        "torchvision_R_50_FPN_v2",
        checksum="sha256:dd69338a24b8d7381807e247652bdc356325bcbaf1cd3e092e00e0a1a58706bf",
        class_names="coco_ids",
    ),
    *(
        _torchvision(
            f"fasterrcnn_mobilenet_v3_large_{version}-coco",
            f"fasterrcnn_mobilenet_v3_large_{version}-{digits}.pth",
            config,
            class_names="coco_ids",
        )
        for version, digits, config in (
            ("fpn", "fb6a3cc7", "torchvision_mobilenet_v3_large_fpn"),
            ("320_fpn", "907ea3f9", "torchvision_mobilenet_v3_large_320_fpn"),
        )
    ),
    _imagenet(
        "resnet50-imagenet1k_v1",
        "resnet50-0676ba61.pth",
        checksum="sha256:0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a",
    ),
    _imagenet("mobilenet_v3_large-imagenet1k_v1", "mobilenet_v3_large-8738ca79.pth"),
    _imagenet("resnet50-imagenet1k_v2", "resnet50-11ad3fa6.pth"),
    _imagenet("resnet101-imagenet1k_v1", "resnet101-63fe2227.pth"),
    _imagenet("resnet101-imagenet1k_v2", "resnet101-cd907fc2.pth"),
    _zoo("faster_rcnn_R_50_C4_1x", 137257644, "721ade", "R_50_C4"),
    _zoo("faster_rcnn_R_50_C4_3x", 137849393, "f97cb7", "R_50_C4"),
    _zoo("faster_rcnn_R_101_C4_3x", 138204752, "298dad", "R_101_C4"),
    _zoo("faster_rcnn_R_50_FPN_1x", 137257794, "b275ba", "R_50_FPN"),
    _zoo("faster_rcnn_R_50_FPN_3x", 137849458, "280758", "R_50_FPN"),
    _zoo("faster_rcnn_R_101_FPN_3x", 137851257, "f6e8b1", "R_101_FPN"),
    _zoo("faster_rcnn_X_101_32x8d_FPN_3x", 139173657, "68b088", "X_101_32x8d_FPN"),
    _zoo("faster_rcnn_R_50_DC5_1x", 137847829, "51d356", "R_50_DC5"),
    _zoo("faster_rcnn_R_50_DC5_3x", 137849425, "68d202", "R_50_DC5"),
    _zoo("faster_rcnn_R_101_DC5_3x", 138204841, "3e0943", "R_101_DC5"),
    _zoo_backbone("MSRA/R-50", "R_50_C4"),
    _zoo_backbone("MSRA/R-101", "R_101_C4"),
    _zoo_backbone("FAIR/X-101-32x8d", "X_101_32x8d_FPN"),
    # "py-bottom-up-attention"; `frcnn-vg-finetuned` is its `faster_rcnn_from_caffe_attr` on the Hugging Face hub.
    _port(
        "frcnn-vg-finetuned",
        "https://huggingface.co/unc-nlp/frcnn-vg-finetuned/resolve/main/pytorch_model.bin",
        "bottom_up_attention",
        suffix=".bin",
    ),
    *(
        _port(f"faster_rcnn_from_caffe{version}", f"{UNC}faster_rcnn_from_caffe{version}.pkl", config, suffix=".pkl")
        for version, config in (
            ("", "bottom_up_attention_no_attributes"),
            ("_attr", "bottom_up_attention"),
            ("_attr_original", "bottom_up_attention"),
        )
    ),
    # "bottom-up-attention.pytorch"
    *(
        _port(name, f"{MILVLG}{key}?download=1", "bottom_up_attention_caffe", suffix=".pth")
        for name, key in (
            ("bua-caffe-frcn-r101-k36", "EUKhQ3hSRv9JrrW64qpNLSIBGoOjEGCkF8zvgBP9gKax-w"),
            ("bua-caffe-frcn-r101-k10-100", "EaXvCC3WjtlLvvEfLr3oa8UBLA21tcLh4L8YLbYXl6jgjg"),
        )
    ),
)


def resolve_weights(name: str | Path) -> Path | PublishedWeights:
    """Return the published weights with this name or URL, or else a path. Nothing is downloaded.

    Existing files and folders take precedence. The start of a name up to any slash may be omitted, and Detectron2's
    suffix `.yaml` is ignored. Anything else is returned as a path, even if it does not exist.
    """
    path = Path(name) if "://" in str(name) else user_path(name)
    if path.exists():
        return path
    key = _key(name)
    return _find(key) or (user_path(key) if "://" in key else path)


def find_published_weights(name: str | Path) -> PublishedWeights | None:
    """Return the published weights with this name, URL or file name, or None."""
    of_file = next((weights for weights in PUBLISHED_WEIGHTS if Path(name).name == weights.file), None)
    if of_file is not None or Path(name).exists():
        return of_file
    return _find(_key(name))


def suggest_names(name: str | Path) -> list[str]:
    """Return up to three names of published weights with a last part similar to that of `name`, best match first."""
    names = {_last(weights.name): weights.name for weights in PUBLISHED_WEIGHTS}
    return [names[last] for last in difflib.get_close_matches(_last(_key(name)), names, n=3, cutoff=0.7)]


def _find(key: str) -> PublishedWeights | None:
    """Find published weights by their URL, their name, or the end of their name after a slash."""
    end = f"/{key.removesuffix('.yaml')}"
    return next((one for one in PUBLISHED_WEIGHTS if key == one.address or f"/{one.name}".endswith(end)), None)


def _last(key: str) -> str:
    return key.removesuffix(".yaml").rpartition("/")[2]


def _key(name: str | Path) -> str:
    """Normalise a name or URL: use forward slashes, and restore the "://" of a URL that was converted to a `Path`."""
    key = re.sub(r"^([\w-]{2,}):/+", r"\1://", Path(name).as_posix() if isinstance(name, Path) else name)
    return key.replace("detectron2://", DETECTRON2, 1) if key.startswith("detectron2://") else key


def cache_folder() -> Path:
    import torch  # slow to import

    return Path(torch.hub.get_dir(), "checkpoints")


def download_weights(weights: PublishedWeights) -> Path:
    """Return the path of the file in torch.hub's cache. Download it if necessary, and verify its checksum.

    If several processes call this at once, only one of them downloads the file.
    """
    import torch  # slow to import

    path = cache_folder() / weights.file
    by_hand = f"download it manually and save it as {path}, or use the path of your file instead of the name"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(f"{path}.lock"):
                if not path.is_file():  # another process may have downloaded it in the meantime
                    with atomic_file(path) as part:
                        torch.hub.download_url_to_file(weights.address, str(part))
        except (OSError, http.client.HTTPException) as error:
            raise MissingFileError(
                f"{weights.name} cannot be downloaded from {weights.address} ({first_line(error)}); {by_hand}."
            ) from error
    difference = _difference(weights, path)
    if difference:
        raise UserError(
            f"{path} is not the published file: {difference}; delete it to download it again, or {by_hand}."
        )
    return path


def _difference(weights: PublishedWeights, path: Path) -> str:
    """Describe why a file cannot be the published one; "" if it can."""
    if path.stat().st_size == 0:
        return "it is empty"
    with path.open("rb") as file:
        if file.read(512).lstrip()[:5].lower() in (b"<!doc", b"<html"):
            return "it is a web page"
        if weights.checksum:
            algorithm, digits = weights.checksum.split(":")
            file.seek(0)
            found = hashlib.file_digest(file, algorithm).hexdigest()
            if not found.startswith(digits):
                return f"its {algorithm} starts with {found[: len(digits)]} instead of {digits}"
    return ""


def read_vocabulary(path: str | Path, number: int, what: str) -> tuple[str, ...]:
    """Read class or attribute names from a text file such as `objects_vocab.txt` or `attributes_vocab.txt`.

    Line i contains the name of class i, from 0. Synonyms after a comma are dropped. There is no line for the background
    or for "no attribute".

    Args:
        number: expected number of names.
        what: "classes" or "attributes", for error messages.
    """
    with reading(path):
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    names = tuple(line.partition(",")[0].strip() for line in lines)
    if len(names) != number or not all(names):
        raise UserError(
            f"{path} has {len([*filter(None, names)])} names, but the detector has {number} {what}; use the file that "
            "belongs to its weights."
        )
    return names

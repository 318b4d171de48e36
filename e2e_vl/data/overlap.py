"""Ids that tell the same image in different data sets.

Data sets share images under different names: RefCOCO, VQA and COCO's captions use images from COCO; GQA uses images
from Visual Genome, about half of which are also in COCO (according to its `image_data.json`). An image has one or more
`GlobalImageId`s; two entries of data sets show the same image if they have an id in common.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from detector.errors import UserError
from detector.io import read_json
from e2e_vl.io import Id, Name, Record, read_text
from e2e_vl.samples import SampleImage

COCO = "coco"
VISUAL_GENOME = "vg"
FLICKR = "flickr"
# COCO_train2014_000000581857.jpg, or 000000581857.jpg in the 2017 release
_COCO_NAME = re.compile(r"(?:COCO_[a-z]+20[0-9]{2}_)?([0-9]{12})")
# Visual Genome's images have plain numbers; GQA's additional images have the prefix n
_VISUAL_GENOME_NAME = re.compile(r"n?[0-9]+")
_VISUAL_GENOME_FOLDER = re.compile(r"VG_100K(_2)?")


class GlobalImageId(NamedTuple):
    """The id of an image, and the data set that gave it."""

    namespace: str
    name: str


class _ListedImage(Record):
    id: Id
    file_name: Name | None = None


class _ImagesFile(Record):
    images: list[_ListedImage]


class _GenomeImage(Record):
    image_id: Id
    coco_id: Id | None = None
    flickr_id: Id | None = None

    def other_ids(self) -> tuple[GlobalImageId, ...]:
        """Return the ids of the image in COCO and at Flickr, as far as they are known."""
        ids = []
        if self.coco_id is not None:
            ids.append(GlobalImageId(COCO, str(self.coco_id)))
        if self.flickr_id is not None:
            ids.append(GlobalImageId(FLICKR, str(self.flickr_id)))
        return tuple(ids)


class ImageIdLookup:
    """Looks up the global ids of images.

    Args:
        genome: further ids of Visual Genome's images, see `read_visual_genome`.
    """

    def __init__(self, genome: Mapping[str, tuple[GlobalImageId, ...]] | None = None) -> None:
        self._genome = genome or {}

    def of_image(
        self, image_id: str, file: Path | None, namespace: str | None, image_aliases: Iterable[tuple[str, str]] = ()
    ) -> tuple[GlobalImageId, ...]:
        """Return all global ids of an image.

        Args:
            file: None for an image in an archive.
            namespace: the `VLDataset.id_namespace` of its data set.
            image_aliases: those of its `SampleImage`, which take precedence over `namespace`.
        """
        coco_id = None if file is None else _coco_id(file.stem)
        if coco_id is not None:
            return (coco_id,)
        aliases = list(image_aliases)
        if not aliases and namespace is not None:
            aliases = [(namespace, image_id)]
        if aliases:
            ids = itertools.chain.from_iterable(self.in_namespace(*alias) for alias in aliases)
            return tuple(dict.fromkeys(ids))
        name = image_id if file is None else str(file.absolute())
        return (GlobalImageId("file", name),)

    def of_sample_image(self, image: SampleImage, namespace: str | None) -> tuple[GlobalImageId, ...]:
        """Return all global ids of an image of a data set with the `VLDataset.id_namespace` `namespace`."""
        file = image.file if isinstance(image.file, Path) else None
        return self.of_image(image.id, file, namespace, image.image_aliases)

    def in_namespace(self, namespace: str, name: str) -> tuple[GlobalImageId, ...]:
        """Return all global ids of the image that has a name in a namespace."""
        image_id = GlobalImageId(namespace, name)
        if namespace != VISUAL_GENOME:
            return (image_id,)
        return (image_id, *self._genome.get(name, ()))

    def of_list(
        self, path: Path, namespace: str | None = None, option: str = "--detector-ids"
    ) -> Iterator[tuple[GlobalImageId, ...]]:
        """Yield the ids of each image in a list, such as the training images of a detector.

        The list is a COCO JSON file (`images` with `id` and `file_name`), Visual Genome's `image_data.json` or a subset
        of it, a JSON list of ids, or a text file whose lines begin with a path or an id, such as the lists of bottom-up
        attention (`VG_100K_2/2400861.jpg xml/2400861.xml`).

        Args:
            namespace: the data set of ambiguous ids, "coco" or "vg".
            option: of the command, that sets it.
        """
        if path.suffix.lower() == ".json":
            content = read_json(path, list[_GenomeImage | Id] | _ImagesFile)
            rows = content.images if isinstance(content, _ImagesFile) else content
        else:
            rows = [line.split()[0] for line in read_text(path).split("\n") if line.strip()]
        for row in rows:
            if isinstance(row, _GenomeImage):
                yield (*self.in_namespace(VISUAL_GENOME, str(row.image_id)), *row.other_ids())
                continue
            if isinstance(row, _ListedImage):
                name = str(row.file_name or row.id)
                image_id = str(row.id)
            else:
                name = str(row)
                image_id = Path(name).stem
            file = Path(name)
            coco_id = _coco_id(file.stem)
            if coco_id is not None:
                yield (coco_id,)
            elif any(_VISUAL_GENOME_FOLDER.fullmatch(folder) for folder in file.parts[:-1]):
                yield self.in_namespace(VISUAL_GENOME, file.stem)
            elif namespace is not None:
                yield self.in_namespace(namespace, image_id)
            else:
                raise UserError(
                    f"{path}: {name!r} is an id of several data sets; add {option} {COCO} or {VISUAL_GENOME}"
                )


def _coco_id(stem: str) -> GlobalImageId | None:
    """Return the id of an image whose file is named as COCO's; None if it is not."""
    match = _COCO_NAME.fullmatch(stem)
    if match is None:
        return None
    return GlobalImageId(COCO, str(int(match[1])))


def aliases_of_id(image_id: str) -> tuple[tuple[str, str], ...]:
    """Return `SampleImage.image_aliases` of an image: Visual Genome's for a number; COCO's file names need none."""
    if _VISUAL_GENOME_NAME.fullmatch(image_id):
        return ((VISUAL_GENOME, image_id),)
    return ()


def count_distinct_images(images: Iterable[tuple[GlobalImageId, ...]]) -> int:
    """Count the distinct images, given the global ids of each entry of a data set."""
    parent: dict[GlobalImageId, GlobalImageId] = {}  # union-find: the ids of an image form a tree

    def root(image_id: GlobalImageId) -> GlobalImageId:
        while parent[image_id] != image_id:
            parent[image_id] = parent[parent[image_id]]
            image_id = parent[image_id]
        return image_id

    for ids in images:
        for image_id in ids:
            parent.setdefault(image_id, image_id)
            parent[root(image_id)] = root(ids[0])
    return sum(image_id == above for image_id, above in parent.items())


def read_visual_genome(path: Path) -> dict[str, tuple[GlobalImageId, ...]]:
    """Read the ids in COCO and at Flickr of Visual Genome's images from `image_data.json`, by image id."""
    return {str(image.image_id): image.other_ids() for image in read_json(path, list[_GenomeImage])}

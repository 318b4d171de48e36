"""Photo ids, for finding the same photo in different data sets.

Data sets share photos under different names: RefCOCO, VQA and COCO's captions use photos from COCO; GQA uses photos
from Visual Genome, about half of which are also in COCO (according to its `image_data.json`). A photo has one or more
`PhotoId`s; two images show the same photo if they have an id in common.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from detector.errors import UserError
from detector.io import read_json
from e2e_vl.io import Id, Name, Record, read_text

COCO, VISUAL_GENOME, FLICKR = "coco", "vg", "flickr"
# COCO_train2014_000000581857.jpg, or 000000581857.jpg in the 2017 release
_COCO_NAME = re.compile(r"(?:COCO_[a-z]+20[0-9]{2}_)?([0-9]{12})")
# Visual Genome's photos have plain numbers; GQA's additional photos have the prefix n
_VISUAL_GENOME_NAME = re.compile(r"n?[0-9]+")
_VISUAL_GENOME_FOLDER = re.compile(r"VG_100K(_2)?")


class PhotoId(NamedTuple):
    """An id, and the data set in which it is used."""

    space: str
    name: str


class _ListedImage(Record):
    id: Id
    file_name: Name | None = None


class _ImagesFile(Record):
    images: list[_ListedImage]


class _GenomePhoto(Record):
    image_id: Id
    coco_id: Id | None = None
    flickr_id: Id | None = None

    def other_ids(self) -> tuple[PhotoId, ...]:
        pairs = ((COCO, self.coco_id), (FLICKR, self.flickr_id))
        return tuple(PhotoId(space, str(number)) for space, number in pairs if number is not None)


class PhotoIds:
    """Looks up the ids of photos; `genome` has further ids of Visual Genome's photos, see `read_visual_genome`."""

    def __init__(self, genome: Mapping[str, tuple[PhotoId, ...]] | None = None) -> None:
        self._genome = genome or {}

    def of_image(
        self, image_id: str, file: Path | None, space: str | None, photo_aliases: Iterable[tuple[str, str]] = ()
    ) -> tuple[PhotoId, ...]:
        """All photo ids of an image in a data set with the `VLDataset.id_space` `space`.

        `file` is None for an image in an archive; `photo_aliases` (`SampleImage`) take precedence over `space`.
        """
        found = None if file is None else _COCO_NAME.fullmatch(file.stem)
        if found:
            return (PhotoId(COCO, str(int(found[1]))),)
        pairs = list(photo_aliases) or ([] if space is None else [(space, image_id)])
        if pairs:
            return tuple(dict.fromkeys(one for pair in pairs for one in self.in_space(*pair)))
        return (PhotoId("file", image_id if file is None else str(file.absolute())),)

    def in_space(self, space: str, name: str) -> tuple[PhotoId, ...]:
        return (PhotoId(space, name), *(self._genome.get(name, ()) if space == VISUAL_GENOME else ()))

    def of_list(self, path: Path, space: str | None = None) -> Iterator[tuple[PhotoId, ...]]:
        """The ids of each photo in a list, such as the training images of a detector.

        The list is a COCO JSON file (`images` with `id` and `file_name`), Visual Genome's `image_data.json` or a subset
        of it, a JSON list of ids, or a text file whose lines begin with a path or an id, such as the lists of bottom-up
        attention (`VG_100K_2/2400861.jpg xml/2400861.xml`). `space` is the data set of ambiguous ids: "coco" or "vg".
        """
        if path.suffix.lower() == ".json":
            content = read_json(path, list[_GenomePhoto | Id] | _ImagesFile)
            rows = content.images if isinstance(content, _ImagesFile) else content
        else:
            rows = [line.split()[0] for line in read_text(path).split("\n") if line.strip()]
        for row in rows:
            if isinstance(row, _GenomePhoto):
                yield (*self.in_space(VISUAL_GENOME, str(row.image_id)), *row.other_ids())
                continue
            name, image_id = (row.file_name or row.id, row.id) if isinstance(row, _ListedImage) else (row, None)
            place = Path(str(name))
            if found := _COCO_NAME.fullmatch(place.stem):
                yield (PhotoId(COCO, str(int(found[1]))),)
            elif any(_VISUAL_GENOME_FOLDER.fullmatch(folder) for folder in place.parts[:-1]):
                yield self.in_space(VISUAL_GENOME, place.stem)
            elif space is not None:
                yield self.in_space(space, place.stem if image_id is None else str(image_id))
            else:
                raise UserError(
                    f"{path}: {str(name)!r} is an id of several data sets; add --detector-ids {COCO} or {VISUAL_GENOME}"
                )


def aliases_of_id(image_id: str) -> tuple[tuple[str, str], ...]:
    """`SampleImage.photo_aliases` of an image: Visual Genome's for a number; COCO's file names need none."""
    return ((VISUAL_GENOME, image_id),) if _VISUAL_GENOME_NAME.fullmatch(image_id) else ()


def count_photos(images: Iterable[tuple[PhotoId, ...]]) -> int:
    """Count the distinct photos among images, given the photo ids of each image."""
    above: dict[PhotoId, PhotoId] = {}  # union-find: the ids of a photo form a tree

    def top(one: PhotoId) -> PhotoId:
        while above[one] != one:
            above[one] = one = above[above[one]]
        return one

    for ids in images:
        for one in ids:
            above.setdefault(one, one)
            above[top(one)] = top(ids[0])
    return sum(one == other for one, other in above.items())


def read_visual_genome(path: Path) -> dict[str, tuple[PhotoId, ...]]:
    return {str(photo.image_id): photo.other_ids() for photo in read_json(path, list[_GenomePhoto])}

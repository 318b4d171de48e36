"""Put annotations into their photos: find the photo, undo the EXIF rotation, scale, clip, and check every box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import numpy as np

from e2e_vl.data.annotation_tools.photos import Photo, Photos
from e2e_vl.data.annotation_tools.records import Annotation, Remarks, Row
from e2e_vl.data.box_checks import (
    MARGIN,
    check_file_boxes,
    look_like_corners,
    reach_outside,
    require_pixels,
    warn_of_normalised_images,
)
from e2e_vl.io import FourNumbers

_SMALL = 2  # pixels
_SHARE_OF_CORNERS = 0.25  # of boxes that reach outside their photos, from which on they may be corners
_FEWEST_CORNERS = 3  # fewer boxes may be drawn carelessly


def place_boxes(
    annotations: Sequence[Annotation], photos: Photos, remarks: Remarks, *, skip_missing: bool
) -> list[Row]:
    """The boxes in pixels of the upright photos, clipped to them; those that cannot be kept go to `remarks`."""
    photo_of = _find_photos(annotations, photos, remarks, skip_missing=skip_missing)
    annotations = [annotation for annotation in annotations if _name(annotation) in photo_of]
    if not annotations:
        return []
    corners = np.array([annotation.corners for annotation in annotations], dtype=np.float64)
    in_pixels = np.array([not annotation.in_shares for annotation in annotations])
    if in_pixels.any():
        require_pixels(corners[in_pixels], str(remarks.source))
    rows_of: dict[tuple[Photo, tuple[int, int] | None], list[int]] = {}
    for row, annotation in enumerate(annotations):
        rows_of.setdefault((photo_of[_name(annotation)], annotation.image_size), []).append(row)
    _turn_upright(rows_of, corners, remarks)
    sizes = np.array([photo_of[_name(annotation)].size for annotation in annotations])
    corners[~in_pixels] *= np.tile(sizes[~in_pixels], 2)
    if in_pixels.any() and not remarks.errors:
        of_pixels = [annotation for annotation in annotations if not annotation.in_shares]
        _check_convention(of_pixels, corners[in_pixels], sizes[in_pixels], remarks)
    keeps_folder_splits = {"train", "val"} <= {annotation.folder_split for annotation in annotations}
    rows = []
    for annotation, box, size in zip(annotations, corners, sizes, strict=True):
        row = Row(
            image=photo_of[_name(annotation)].name,
            label=annotation.label.strip(),
            box=_clip(annotation.where, box, size, remarks),
            text=(annotation.text or "").strip() or None,
            split=annotation.split or (annotation.folder_split if keeps_folder_splits else ""),
            id=annotation.id,
            is_crowd=annotation.is_crowd,
            where=annotation.where,
        )
        if not row.label:
            remarks.refuse("boxes without a label", row.where)
        rows.append(row)
    _note_boxes(rows, remarks)
    return rows


def _note_boxes(rows: Sequence[Row], remarks: Remarks) -> None:
    """Note boxes that repeat an earlier one, unless they add a text, and boxes that the detector does not learn."""
    earlier = set()
    for row in rows:
        box = (row.image, row.label, row.box)
        if box in earlier and row.text is None:
            remarks.note("boxes that repeat an earlier one are left out", row.where)
        elif row.is_crowd:
            remarks.note(
                "boxes of groups (iscrowd) may be referred to, but the detector does not learn them", row.where
            )
        earlier.add(box)


def _name(annotation: Annotation) -> tuple[str, str]:
    """What a file says about the name of its photo."""
    return annotation.image, annotation.other_name


def _find_photos(
    annotations: Sequence[Annotation], photos: Photos, remarks: Remarks, *, skip_missing: bool
) -> dict[tuple[str, str], Photo]:
    """The photos of the names that mean exactly one."""
    photo_of = {}
    missing = set()
    names = list(dict.fromkeys(map(_name, annotations)))
    named_photos: set[str] = set()
    for image, _ in names:
        named_photos.update(photos.candidates(image))
    for image, other_name in names:
        candidates = photos.candidates(image)
        if not candidates:
            candidates = [photo for photo in photos.with_another_suffix(image) if photo not in named_photos]
            if candidates:
                remarks.note("photos have another suffix than in the export", image)
        namesakes = photos.candidates(other_name) if other_name else []
        if not candidates and namesakes:
            candidates = namesakes
            remarks.note("renamed photos were found by the names of their annotation files", image)
        elif namesakes and set(namesakes).isdisjoint(candidates):
            record = f"{other_name} ({image})"
            remarks.note("annotation files name another photo than the one with their own name", record)
        if len(candidates) == 1:
            photo_of[image, other_name] = photos.read(candidates[0])
        elif candidates:
            remedy = "rename photos, or write their folders in the names"
            remarks.refuse("names that several photos have", f"{image} ({', '.join(candidates)})", remedy)
        else:
            missing.add((image, other_name))
            if not skip_missing:
                _refuse_missing(image, photos, remarks)
    for annotation in annotations:
        if skip_missing and _name(annotation) in missing:
            remarks.note("boxes of missing photos are left out", annotation.where)
    _check_files_of_photos(photo_of, remarks)
    return photo_of


def _refuse_missing(image: str, photos: Photos, remarks: Remarks) -> None:
    in_other_formats = photos.in_other_formats(image)
    if in_other_formats:
        remedy = "save them as JPEG or PNG, or leave them out with --skip-missing"
        remarks.refuse("photos in a format that is not read", ", ".join(in_other_formats), remedy)
    else:
        remedy = "put them there, give their folder as --images, or leave them out with --skip-missing"
        remarks.refuse(f"photos that are not in {photos.folder}", image, remedy)


def _check_files_of_photos(photo_of: Mapping[tuple[str, str], Photo], remarks: Remarks) -> None:
    """Refuse several annotation files of formats with one file per photo that name the same photo.

    One of them may be a copy that still names the old photo. Files of one name in several folders are only noted.
    """
    files_of: dict[str, list[str]] = {}
    for (_, other_name), photo in photo_of.items():
        if other_name:
            files_of.setdefault(photo.name, []).append(other_name)
    for photo_name, files in files_of.items():
        record = f"{photo_name} ({', '.join(files)})"
        if len({PurePosixPath(file).name for file in files}) > 1:
            remedy = "correct the names of photos in the files, or keep one of the files"
            remarks.refuse("photos that several annotation files name", record, remedy)
        elif len(files) > 1:
            remarks.note("photos have several annotation files, whose boxes are joined", record)


def _turn_upright(
    rows_of: Mapping[tuple[Photo, tuple[int, int] | None], list[int]], corners: np.ndarray, remarks: Remarks
) -> None:
    """Turn boxes, xyxy float [R, 4], in place that were drawn on the stored raster of a photo with EXIF rotation.

    Most tools show photos upright, and some the raster; the size that a file states for the photo tells which. Equal
    sides, or no size, mean an upright photo. Some exports state the sides of the raster, but boxes of the upright
    photo: then some boxes fit only the upright photo, and none only the raster.

    Args:
        rows_of: photo, and (width, height) that the file states -> rows of `corners`.
    """
    swapped = []
    for (photo, annotated_size), rows in rows_of.items():
        if annotated_size is None or annotated_size == photo.size:
            continue
        if photo.is_rotated and annotated_size == photo.size[::-1]:
            swapped.append((photo, rows))
            continue
        sizes = "annotated as {} x {} pixels, but it has {} x {}".format(*annotated_size, *photo.size)
        remarks.refuse("photos of another size", f"{photo.name} ({sizes})", "use the photos that were annotated")
    fits_photo = [not reach_outside(corners[rows], np.array(photo.size)).any() for photo, rows in swapped]
    fits_raster = [not reach_outside(corners[rows], np.array(photo.size[::-1])).any() for photo, rows in swapped]
    fits = list(zip(fits_photo, fits_raster, strict=True))
    are_upright = (True, False) in fits and (False, True) not in fits
    for (photo, rows), fit in zip(swapped, fits, strict=True):
        if are_upright or fit == (True, False):
            remarks.note("upright photos have swapped sides in the export", photo.name)
        else:
            remarks.note("photos were annotated as stored, so their boxes were turned upright (EXIF)", photo.name)
            corners[rows] = photo.turn_upright(corners[rows])


def _check_convention(
    annotations: Sequence[Annotation], boxes: np.ndarray, sizes: np.ndarray, remarks: Remarks
) -> None:
    """Refuse or note boxes that look like corners in place of [x, y, width, height]; warn if many reach outside.

    Args:
        boxes: xyxy in pixels, [R, 4].
        sizes: (width, height) of the photo of each box, [R, 2].
    """
    images = [annotation.image for annotation in annotations]
    if all(annotation.states_corners for annotation in annotations):
        warn_of_normalised_images(boxes, images, str(remarks.source))
        return
    outside = np.flatnonzero(reach_outside(boxes, sizes))
    fit_as_corners = boxes.min() >= -MARGIN and look_like_corners(boxes, sizes)
    if len(outside) >= _SHARE_OF_CORNERS * len(boxes) and fit_as_corners:
        for row in outside:
            where = annotations[row].where
            if len(outside) >= _FEWEST_CORNERS:
                problem = (
                    "boxes [x, y, width, height] outside their photos that fit as corners [xmin, ymin, xmax, ymax]"
                )
                remarks.refuse(problem, where, "export or name them as what they are")
            else:
                remarks.note(
                    "boxes reach outside by more than a pixel and look like corners, not x, y, width, height", where
                )
    check_file_boxes(boxes, sizes, images, str(remarks.source))


def _clip(where: str, corners: np.ndarray, size: np.ndarray, remarks: Remarks) -> FourNumbers:
    """[x, y, width, height] within the photo, rounded to hundredths of a pixel."""
    x1, y1, x2, y2 = corners.tolist()
    if x2 <= x1 or y2 <= y1:
        remarks.refuse("boxes without area", f"{where} (width {x2 - x1:g}, height {y2 - y1:g})")
        return x1, y1, 0, 0
    left, top = max(x1, 0), max(y1, 0)
    width, height = min(x2, float(size[0])) - left, min(y2, float(size[1])) - top
    box = (round(left, 2), round(top, 2), round(width, 2), round(height, 2))
    if box[2] <= 0 or box[3] <= 0:
        details = f"{where} ([{x1:g}, {y1:g}, {x2:g}, {y2:g}] in {size[0]} x {size[1]})"
        is_outside = width <= 0 or height <= 0
        problem = "boxes outside their photos" if is_outside else "boxes smaller than a hundredth of a pixel"
        remarks.refuse(problem, details)
    elif max(box[2:]) < _SMALL:
        remarks.note("boxes have less than 2 x 2 pixels", where)
    elif reach_outside(corners[None], size).any():
        remarks.note("boxes were clipped to their photos", where)
    return box

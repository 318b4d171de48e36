"""Put annotations into their images: find the image, undo the EXIF rotation, scale, clip, and check every box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import numpy as np

from e2e_vl.data.annotation_tools.images import ImageFolder, UprightImage
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
_SHARE_OF_CORNERS = 0.25  # of boxes that reach outside their images, from which on they may be corners
_FEWEST_CORNERS = 3  # fewer boxes may be drawn carelessly


def place_boxes(
    annotations: Sequence[Annotation], image_folder: ImageFolder, remarks: Remarks, *, skip_missing: bool
) -> list[Row]:
    """Return the boxes in pixels of the upright images, clipped to them; those that are lost go to `remarks`."""
    image_of = _find_images(annotations, image_folder, remarks, skip_missing=skip_missing)
    annotations = [annotation for annotation in annotations if _image_names(annotation) in image_of]
    if not annotations:
        return []
    images = [image_of[_image_names(annotation)] for annotation in annotations]
    corners = np.array([annotation.corners for annotation in annotations], dtype=np.float64)
    in_pixels = np.array([not annotation.in_shares for annotation in annotations])
    if in_pixels.any():
        require_pixels(corners[in_pixels], str(remarks.source))

    rows_of: dict[tuple[UprightImage, tuple[int, int] | None], list[int]] = {}
    for row, (annotation, image) in enumerate(zip(annotations, images, strict=True)):
        rows_of.setdefault((image, annotation.image_size), []).append(row)
    _turn_upright(rows_of, corners, remarks)

    sizes = np.array([image.size for image in images])
    corners[~in_pixels] *= np.tile(sizes[~in_pixels], 2)
    if in_pixels.any() and not remarks.errors:
        annotations_in_pixels = [annotation for annotation in annotations if not annotation.in_shares]
        _check_convention(annotations_in_pixels, corners[in_pixels], sizes[in_pixels], remarks)

    has_folder_splits = {"train", "val"} <= {annotation.folder_split for annotation in annotations}
    rows = []
    for annotation, image, box in zip(annotations, images, corners, strict=True):
        split = annotation.split
        if not split and has_folder_splits:
            split = annotation.folder_split
        row = Row(
            image=image.name,
            label=annotation.label.strip(),
            box=_clip(annotation.where, box, image.size, remarks),
            text=(annotation.text or "").strip() or None,
            split=split,
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
    earlier_boxes = set()
    for row in rows:
        box = (row.image, row.label, row.box)
        if box in earlier_boxes and row.text is None:
            remarks.note("boxes that repeat an earlier one are left out", row.where)
        elif row.is_crowd:
            remarks.note(
                "boxes of groups (iscrowd) may be referred to, but the detector does not learn them", row.where
            )
        earlier_boxes.add(box)


def _image_names(annotation: Annotation) -> tuple[str, str]:
    """Return what a file says about the name of its image: the name, and another one that may stand for it."""
    return annotation.image, annotation.other_name


def _find_images(
    annotations: Sequence[Annotation], image_folder: ImageFolder, remarks: Remarks, *, skip_missing: bool
) -> dict[tuple[str, str], UprightImage]:
    """Return the images of the names that mean exactly one."""
    image_of = {}
    missing = set()
    names = list(dict.fromkeys(map(_image_names, annotations)))
    named_files: set[str] = set()
    for image, _ in names:
        named_files.update(image_folder.candidates(image))
    for image, other_name in names:
        candidates = image_folder.candidates(image)
        if not candidates:
            candidates = [file for file in image_folder.with_another_suffix(image) if file not in named_files]
            if candidates:
                remarks.note("images have another suffix than in the export", image)
        namesakes = image_folder.candidates(other_name) if other_name else []
        if not candidates and namesakes:
            candidates = namesakes
            remarks.note("renamed images were found by the names of their annotation files", image)
        elif namesakes and set(namesakes).isdisjoint(candidates):
            record = f"{other_name} ({image})"
            remarks.note("annotation files name another image than the one with their own name", record)
        if len(candidates) == 1:
            image_of[image, other_name] = image_folder.read(candidates[0])
        elif candidates:
            remedy = "rename images, or write their folders in the names"
            remarks.refuse("names that several images have", f"{image} ({', '.join(candidates)})", remedy)
        else:
            missing.add((image, other_name))
            if not skip_missing:
                _refuse_missing(image, image_folder, remarks)
    for annotation in annotations:
        if skip_missing and _image_names(annotation) in missing:
            remarks.note("boxes of missing images are left out", annotation.where)
    _check_files_of_images(image_of, remarks)
    return image_of


def _refuse_missing(image: str, image_folder: ImageFolder, remarks: Remarks) -> None:
    in_other_formats = image_folder.in_other_formats(image)
    if in_other_formats:
        remedy = "save them as JPEG or PNG, or leave them out with --skip-missing"
        remarks.refuse("images in a format that is not read", ", ".join(in_other_formats), remedy)
    else:
        remedy = "put them there, give their folder as --images, or leave them out with --skip-missing"
        remarks.refuse(f"images that are not in {image_folder.path}", image, remedy)


def _check_files_of_images(image_of: Mapping[tuple[str, str], UprightImage], remarks: Remarks) -> None:
    """Refuse several annotation files of formats with one file per image that name the same image.

    One of them may be a copy that still names the old image. Files of one name in several folders are only noted.
    """
    files_of: dict[str, list[str]] = {}
    for (_, other_name), image in image_of.items():
        if other_name:
            files_of.setdefault(image.name, []).append(other_name)
    for image_name, files in files_of.items():
        record = f"{image_name} ({', '.join(files)})"
        if len({PurePosixPath(file).name for file in files}) > 1:
            remedy = "correct the names of images in the files, or keep one of the files"
            remarks.refuse("images that several annotation files name", record, remedy)
        elif len(files) > 1:
            remarks.note("images have several annotation files, whose boxes are joined", record)


def _turn_upright(
    rows_of: Mapping[tuple[UprightImage, tuple[int, int] | None], list[int]], corners: np.ndarray, remarks: Remarks
) -> None:
    """Turn boxes, xyxy float [R, 4], in place that were drawn on the stored raster of an image with EXIF rotation.

    Most tools show images upright, and some the raster; the size that a file states for the image tells which. Equal
    sides, or no size, mean an upright image. Some exports state the sides of the raster, but boxes of the upright
    image: then some boxes fit only the upright image, and none only the raster.

    Args:
        rows_of: image, and (width, height) that the file states -> rows of `corners`.
    """
    swapped = []
    for (image, annotated_size), rows in rows_of.items():
        if annotated_size is None or annotated_size == image.size:
            continue
        if image.is_rotated and annotated_size == image.size[::-1]:
            swapped.append((image, rows))
            continue
        sizes = "annotated as {} x {} pixels, but it has {} x {}".format(*annotated_size, *image.size)
        remarks.refuse("images of another size", f"{image.name} ({sizes})", "use the images that were annotated")

    fit_only_upright = []
    fit_only_raster = []
    for image, rows in swapped:
        fits_upright = not reach_outside(corners[rows], np.array(image.size)).any()
        fits_raster = not reach_outside(corners[rows], np.array(image.size[::-1])).any()
        fit_only_upright.append(fits_upright and not fits_raster)
        fit_only_raster.append(fits_raster and not fits_upright)
    are_all_upright = any(fit_only_upright) and not any(fit_only_raster)
    for (image, rows), is_upright in zip(swapped, fit_only_upright, strict=True):
        if are_all_upright or is_upright:
            remarks.note("upright images have swapped sides in the export", image.name)
        else:
            remarks.note("images were annotated as stored, so their boxes were turned upright (EXIF)", image.name)
            corners[rows] = image.turn_upright(corners[rows])


def _check_convention(
    annotations: Sequence[Annotation], boxes: np.ndarray, sizes: np.ndarray, remarks: Remarks
) -> None:
    """Refuse or note boxes that look like corners and not [x, y, width, height]; warn if many reach outside.

    Args:
        boxes: xyxy in pixels, [R, 4].
        sizes: (width, height) of the image of each box, [R, 2].
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
                    "boxes [x, y, width, height] outside their images that fit as corners [xmin, ymin, xmax, ymax]"
                )
                remarks.refuse(problem, where, "export or name them as what they are")
            else:
                remarks.note(
                    "boxes reach outside by more than a pixel and look like corners, not x, y, width, height", where
                )
    check_file_boxes(boxes, sizes, images, str(remarks.source))


def _clip(where: str, corners: np.ndarray, image_size: tuple[int, int], remarks: Remarks) -> FourNumbers:
    """Return [x, y, width, height] within the image, rounded to hundredths of a pixel."""
    x1, y1, x2, y2 = corners.tolist()
    image_width, image_height = image_size
    if x2 <= x1 or y2 <= y1:
        remarks.refuse("boxes without area", f"{where} (width {x2 - x1:g}, height {y2 - y1:g})")
        return x1, y1, 0, 0
    left = max(x1, 0)
    top = max(y1, 0)
    width = min(x2, float(image_width)) - left
    height = min(y2, float(image_height)) - top
    box = (round(left, 2), round(top, 2), round(width, 2), round(height, 2))
    if box[2] <= 0 or box[3] <= 0:
        details = f"{where} ([{x1:g}, {y1:g}, {x2:g}, {y2:g}] in {image_width} x {image_height})"
        is_outside = width <= 0 or height <= 0
        problem = "boxes outside their images" if is_outside else "boxes smaller than a hundredth of a pixel"
        remarks.refuse(problem, details)
    elif max(box[2:]) < _SMALL:
        remarks.note("boxes have less than 2 x 2 pixels", where)
    elif reach_outside(corners[None], np.array(image_size)).any():
        remarks.note("boxes were clipped to their images", where)
    return box

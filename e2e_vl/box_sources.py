"""Where the candidate boxes of an image come from: the one list of sources, and what each of them reads."""

from __future__ import annotations

import enum


class BoxSource(enum.StrEnum):
    """A source of candidate boxes, as settings and commands name it.

    GT: all annotated objects of the image, crowds too. DETECTIONS: a file of detected boxes. DETECTIONS_GT: that file's
    boxes, then all annotated objects; for training only. ONLINE: the detector of the model proposes them. PRECOMPUTED:
    boxes and features of a features file; no image is read.
    """

    GT = "gt"
    DETECTIONS = "detections"
    DETECTIONS_GT = "detections+gt"
    ONLINE = "online"
    PRECOMPUTED = "precomputed"

    @property
    def metric_suffix(self) -> str:
        """How names of metrics end that were measured with these boxes, such as `accuracy_own_boxes`."""
        return {
            BoxSource.GT: "gt_boxes",
            BoxSource.DETECTIONS: "detected_boxes",
            BoxSource.ONLINE: "own_boxes",
            BoxSource.PRECOMPUTED: "precomputed_boxes",
        }[self]

    @property
    def needs(self) -> tuple[str, ...]:
        """Keys of `data.files` that the source reads."""
        return {
            BoxSource.GT: ("instances",),
            BoxSource.DETECTIONS: ("detections",),
            BoxSource.DETECTIONS_GT: ("instances", "detections"),
            BoxSource.ONLINE: (),
            BoxSource.PRECOMPUTED: ("features",),
        }[self]

    @property
    def reads_annotations(self) -> bool:
        """Annotated objects are among the candidates."""
        return self in (BoxSource.GT, BoxSource.DETECTIONS_GT)

    @property
    def reads_selection(self) -> bool:
        """`data.boxes.selection` says which of its boxes are candidates."""
        return self in (BoxSource.DETECTIONS, BoxSource.DETECTIONS_GT)

    @classmethod
    def for_evaluation(cls) -> tuple[BoxSource, ...]:
        """All sources but the mixture that adds the truth."""
        return tuple(source for source in cls if source is not cls.DETECTIONS_GT)

from __future__ import annotations

import pytest

from e2e_vl.config import BoxSource


def test_sources_are_named_as_in_settings():
    assert {str(source) for source in BoxSource} == {"gt", "detections", "detections+gt", "online", "precomputed"}
    assert BoxSource("detections+gt") is BoxSource.DETECTIONS_GT
    with pytest.raises(ValueError, match="'proposals' is not a valid BoxSource"):
        BoxSource("proposals")


@pytest.mark.parametrize(
    ("source", "files", "reads_annotations"),
    [
        ("gt", ("instances",), True),
        ("detections", ("detections",), False),
        ("detections+gt", ("instances", "detections"), True),
        ("online", (), False),
        ("precomputed", ("features",), False),
    ],
)
def test_what_a_source_reads(source, files, reads_annotations):
    assert f"{BoxSource(source)}" == source
    assert BoxSource(source).needs == files
    assert BoxSource(source).reads_annotations is reads_annotations


def test_the_selection_is_about_detections_of_a_file():
    assert [source for source in BoxSource if source.reads_selection] == ["detections", "detections+gt"]


def test_the_truth_is_never_mixed_into_evaluation():
    sources = BoxSource.for_evaluation()
    assert set(BoxSource) - set(sources) == {BoxSource.DETECTIONS_GT}
    suffixes = [source.metric_suffix for source in sources]
    assert suffixes == ["gt_boxes", "detected_boxes", "predicted_boxes", "precomputed_boxes"]

"""Frames of a video file are read at a rate."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

import e2e_vl
from detector.errors import UserError
from detector.images import load_image
from e2e_vl.data.videos import read_frames

LEVELS = range(0, 240, 12)  # grey level of each frame


@pytest.fixture
def clip(tmp_path) -> Path:
    """A video of two seconds, ten frames each."""
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10.0, (64, 48))
    for level in LEVELS:
        writer.write(np.full((48, 64, 3), level, np.uint8))
    writer.release()
    return path


@pytest.mark.parametrize(("rate", "numbers"), [(1, [0, 10]), (2.5, [0, 4, 8, 12, 16]), (3, [0, 3, 7, 10, 13, 17])])
def test_frames_at_a_rate(clip, rate, numbers):
    frames = list(read_frames(clip, rate))
    assert [frame.name for frame in frames] == [f"{clip} at {number / 10:.2f} s" for number in numbers]
    levels = [load_image(frame.content, "RGB").mean() for frame in frames]
    assert levels == pytest.approx([LEVELS[number] for number in numbers], abs=3)


def test_a_rate_above_that_of_the_video_gives_every_frame_once(clip):
    assert len(list(e2e_vl.video_frames(clip, 1000))) == len(LEVELS)


def test_a_video_in_place_of_an_image_is_told_how_to_get_its_frames(clip):
    with pytest.raises(UserError, match=r"is a video, which cannot be read; ask about its frames \(.*video_frames\)"):
        load_image(clip, "RGB")


def test_what_is_no_video_is_refused(tmp_path):
    (tmp_path / "clip.mp4").write_text("no video")
    with pytest.raises(UserError, match="no frame of this video"):
        list(read_frames(tmp_path / "clip.mp4"))
    with pytest.raises(UserError, match="above 0"):
        read_frames(tmp_path / "clip.mp4", 0)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_frames(tmp_path / "none.mp4")

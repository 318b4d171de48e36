"""Read the frames of a video file at a stated rate, with OpenCV."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from detector.errors import MissingFileError, UserError, user_path
from e2e_vl.samples import ImageBytes

VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg")


def is_video(path: str | os.PathLike) -> bool:
    """Return whether the name of a file is that of a video."""
    return os.fsdecode(path).lower().endswith(VIDEO_SUFFIXES)


def read_frames(video: str | os.PathLike, frames_per_second: float = 1.0) -> Iterator[ImageBytes]:
    """Yield frames of a video file, the first one at 0 s, as PNG; their names state the file and the time.

    A frame is the one that is shown at its time. A rate above that of the video yields every frame once.
    """
    if not (math.isfinite(frames_per_second) and frames_per_second > 0):
        raise UserError(f"The frames per second are {frames_per_second}; they must be a number above 0.")
    path = user_path(video, "Video")
    if not path.is_file():
        raise MissingFileError(f"Video {path} does not exist.")
    return _frames(path, frames_per_second)


def _frames(path: Path, frames_per_second: float) -> Iterator[ImageBytes]:
    import cv2  # late: takes long

    capture = cv2.VideoCapture(str(path))
    video_rate = capture.get(cv2.CAP_PROP_FPS)
    step = max(video_rate / frames_per_second, 1.0)  # frames of the video for each one that is read
    number = 0  # of the video's frames
    count = 0  # of those that were read
    try:
        while capture.grab():
            if number + 0.5 >= count * step:
                is_read, pixels = capture.retrieve()
                if not is_read:
                    break
                _, content = cv2.imencode(".png", pixels)
                yield ImageBytes(content.tobytes(), f"{path} at {number / video_rate:.2f} s")
                count += 1
            number += 1
    finally:
        capture.release()
    if count == 0:
        raise UserError(f"{path}: OpenCV reads no frame of this video; convert it to MP4, or give a folder of frames.")

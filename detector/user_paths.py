"""Paths as users write them, in settings, on the command line and in Python."""

from __future__ import annotations

from pathlib import Path

from detector.errors import UserError


def user_path(written: str | Path) -> Path:
    """The path that a user wrote, with `~` and `~name` replaced by home folders; nothing need be there.

    Raises:
        UserError: it has a zero byte, is an address of the web, or begins with an unknown user's home.
    """
    text = str(written)
    if "\0" in text:
        raise UserError(f"{text!r} cannot be a path, since it has a zero byte; correct it.")
    if isinstance(written, str) and text.startswith(("http://", "https://", "ftp://", "file://")):
        raise UserError(f"{text} is an address and not a path; download the file first, and give its path.")
    try:
        return Path(written).expanduser()
    except RuntimeError as error:
        raise UserError(f"{text}: this machine knows no home folder for the part before the first slash.") from error

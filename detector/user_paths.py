"""Paths as users write them, in settings, on the command line and in Python."""

from __future__ import annotations

from pathlib import Path

from detector.errors import UserError

_ADDRESSES = ("http://", "https://", "ftp://", "file://", "s3://")
_LONGEST = 100  # characters of a path in a message


def user_path(written: str | Path, what: str = "The path") -> Path:
    """The path that a user wrote, with `~` and `~name` replaced by home folders; nothing need be there.

    Args:
        what: begins the message.

    Raises:
        UserError: no file can have this name, it is an address of the web, its links lead to each other, or it begins
            with an unknown user's home.
    """
    text = str(written)
    if isinstance(written, str) and text.startswith(_ADDRESSES):
        raise UserError(f"{what} {_shown(text)} is an address and not a path; download the file first.")
    try:
        path = Path(written).expanduser()
        path.exists()
        path.resolve()
    except RuntimeError:
        reason = "its links lead to each other, or ~ stands before an unknown name"
    except ValueError:  # a zero byte, half of a character
        reason = "no file can have this name"
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
    else:
        return path
    raise UserError(f"{what} {_shown(text)} cannot be looked for ({reason}); give another path.")


def _shown(text: str) -> str:
    written = repr(text)
    return written if len(written) <= _LONGEST else f"{written[: _LONGEST // 2]}...{written[-_LONGEST // 2 :]}"

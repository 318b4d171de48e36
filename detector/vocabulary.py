"""Names of classes or attributes from the text files that bottom-up attention publishes with its weights."""

from __future__ import annotations

from pathlib import Path

from detector.errors import MissingFileError, UserError
from detector.file_faults import reading


def read_vocabulary(path: str | Path, number: int, what: str) -> tuple[str, ...]:
    """Names from a text file such as `objects_vocab.txt` or `attributes_vocab.txt`: line i names number i, from 0.

    A line may hold synonyms behind commas, which are left out. There is no line for the background or for "no
    attribute".

    Args:
        number: how many names are needed.
        what: the plural of what is named, for messages.

    Raises:
        FileNotFoundError, ValueError: there is no such file, it is no text, has another number of lines, or a line
            without a name.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file of names; give a text file with a line for each of the {what}.")
    try:
        with reading(path):
            lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a UTF-8 text file; give one with a line for each of the {what}.") from error
    names = tuple(line.partition(",")[0].strip() for line in lines)
    if len(names) != number:
        raise UserError(
            f"{path} names {len(names)} {what}, but the detector has {number}; give the file that belongs to its "
            "weights."
        )
    if not all(names):
        raise UserError(f"{path}, line {names.index('') + 1} has no name; correct it, or download the file again.")
    return names

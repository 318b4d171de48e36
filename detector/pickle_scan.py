"""Following the opcodes of a pickle before it is loaded, so that a small file cannot fill the memory or the time.

An unpickler that calls no function of the file still believes it about sizes: a place in the memo of 2**31 makes a
table of 32 GiB, a tuple of tuples as a key of a dict is hashed for hours or ends the process, and a few bytes name
numbers of gigabytes. Nothing is built here; what would be built is bounded relative to the size of the file.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import NoReturn

from detector.errors import reading

Bytes = bytes | mmap.mmap

LONGEST_NUMBER = 255  # bytes of an integer; no training needs longer ones
LONGEST_KEY = 4096  # bytes of a string that may be a key of a dict
LONGEST_TUPLE = 16  # items of a tuple that may be a key of a dict
MOST_TUPLES = 1 << 19  # of a pickle; a file of weights has about four per tensor
SMALL_CONTENT = 1 << 28  # bytes of lists and dicts that every file may make ...
CONTENT_PER_BYTE = 16  # ... and that it may make per byte of its own
_LIST, _DICT = 80, 240  # bytes in memory, about

_FIXED = {  # opcode -> bytes of its argument, for opcodes that need no further look here
    **dict.fromkeys(b"(N)012ao\x81\x88\x89\x8f\x90\x91\x92\x93\x94RQbs", 0),
    **dict.fromkeys(b"K\x80h", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"Jj", 4),
    **dict.fromkeys(b"G", 8),
}
_SIZED = {  # opcode -> bytes of the length that stands before its content
    **dict.fromkeys(b"UC\x8c\x8a", 1),
    **dict.fromkeys(b"TXB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_LINES = {**dict.fromkeys(b"FILSVPgp", 1), **dict.fromkeys(b"ci", 2)}  # opcode -> lines of text that follow
_CONTAINERS = {ord("]"): _LIST, ord("l"): _LIST, ord("e"): 0, ord("}"): _LIST, ord("d"): _DICT, ord("u"): _DICT}
_TUPLES = frozenset(b"t\x85\x86\x87")
_NEVER_WRITTEN = {
    ord("2"): "DUP",
    **dict.fromkeys(b"\x82\x83\x84", "an extension code"),
    **dict.fromkeys(b"\x97\x98", "a buffer outside of the file"),
    **dict.fromkeys(b"\x8f\x90\x91", "a set"),
}
_SHORT_STRINGS = b"|".join(b"\\x%02x\\x00\\x00\\x00.{%d}" % (n, n) for n in range(1, 48))
_TINY = b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(1, 48))
# Most opcodes of a large file need no look at all, and a regular expression passes over them faster than a loop. Its
# places in the memo are below a million, and it leaves out all that makes tuples.
_RUN = re.compile(
    rb"(?s:X(?:" + _SHORT_STRINGS + rb")|q.|[\x8c](?:" + _TINY + rb")|r..[\x00-\x3f]\x00|[Kh].|M..|[Jj].{4}"
    rb"|[N0aseubR\x88\x89\x94]|[\]}]|\([dl]?+|G.{8}"
    rb"|[SV][^\n]{0,4000}\n|[pg][0-9]{1,6}\n|I-?[0-9]{1,18}\n){0,20000}+"
)
_IN_RUN = ((b"}", _DICT), (b"(d", _DICT), (b"]", _LIST), (b"(l", _LIST))  # texts have few of these characters
_SPECIAL, _NEVER, _UNKNOWN = -1, -2, -3
_STEPS = [_UNKNOWN] * 256  # bytes from one opcode to the next, or one of the above
for _code, _length in _FIXED.items():
    _STEPS[_code] = 1 + _length
for _code in (*_SIZED, *_LINES, *_CONTAINERS, *_TUPLES, *b"qr.\x95s"):
    _STEPS[_code] = _SPECIAL
for _code in _NEVER_WRITTEN:
    _STEPS[_code] = _NEVER


class DamagedPickleError(ValueError):
    """A pickle is cut off, or claims more than a file of its size can hold."""


def check_pickle(data: Bytes, start: int = 0) -> int:
    """Check one pickle without loading it.

    Args:
        data: the file, in memory or mapped.
        start: where the pickle begins.

    Returns:
        the place behind its end.

    Raises:
        DamagedPickleError: the pickle is cut off or has an unknown opcode; a length or a place in the memo lies beyond
            the file; an integer has more than `LONGEST_NUMBER` bytes; the lists and dicts would take much more memory
            than the file; there are more than `MOST_TUPLES` tuples; or a dict has a key that is a tuple of tuples or a
            very long string.
    """
    try:
        end, has_tuples = _measure(data, start)
        if has_tuples:  # without them no key can be deep, since lists and dicts are no keys
            _Keys(data, start, end).check()
    except IndexError as error:
        raise DamagedPickleError("it is cut off") from error
    return end


def check_pickle_file(path: Path) -> None:
    """`check_pickle` of a whole file, which is mapped and not read into memory.

    Raises:
        DamagedPickleError: see `check_pickle`; or the file is empty.
    """
    with reading(path), path.open("rb") as file:
        if not path.stat().st_size:
            raise DamagedPickleError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            check_pickle(data)


def _measure(data: Bytes, start: int) -> tuple[int, bool]:
    """The end of the pickle, and whether it makes tuples of other things."""
    size, position, content, tuples = len(data), start, 0, 0
    steps, containers, sized = _STEPS, _CONTAINERS, _SIZED
    while True:
        end = _RUN.match(data, position).end()
        if end > position:
            run = data[position:end]
            content += sum(count * run.count(characters) for characters, count in _IN_RUN)
            position = end
        code = data[position]
        step = steps[code]
        if step > 0:
            position += step
        elif code == 0x71:  # BINPUT
            position += 2
        elif code in sized:
            width = sized[code]
            length = int.from_bytes(data[position + 1 : position + 1 + width], "little")
            if length > size - position:
                _refuse_length(code, length)
            if code == 0x8B and length > LONGEST_NUMBER:
                raise DamagedPickleError(f"it has an integer of {length} bytes")
            position += 1 + width + length
        elif code in containers:
            content += containers[code]
            position += 1
        elif code == 0x73:  # SETITEM
            content += _DICT
            position += 1
        elif code == 0x72:  # LONG_BINPUT
            _check_memo(int.from_bytes(data[position + 1 : position + 5], "little"), position - start)
            position += 5
        elif code in _TUPLES:
            tuples += 1
            position += 1
        elif code == 0x2E:  # STOP
            break
        else:
            position = _skip_rare(data, position, start)
    if position >= size:
        raise DamagedPickleError("it is cut off")
    if content > SMALL_CONTENT + CONTENT_PER_BYTE * (position - start):
        raise DamagedPickleError("its lists and dicts would take far more memory than the file")
    if tuples > MOST_TUPLES:
        raise DamagedPickleError(f"it has {tuples} tuples; at most {MOST_TUPLES} are expected")
    return position + 1, tuples > 0


def _refuse_length(code: int, length: int) -> NoReturn:
    what = "an integer" if code in b"\x8a\x8b" else "a string"
    raise DamagedPickleError(f"it is cut off, or claims {what} of {length} bytes")


def _check_memo(place: int, position: int) -> None:
    """Every thing in the memo takes bytes of the file before it."""
    if place > position:
        raise DamagedPickleError(f"it uses place {place} of the memo, more than a file of its size can need")


def _skip_rare(data: Bytes, position: int, start: int) -> int:
    """The place behind an opcode of text lines or a frame."""
    code = data[position]
    if code in _LINES:
        end = position
        for _ in range(_LINES[code]):
            end = data.find(b"\n", end + 1)
            if end < 0:
                raise DamagedPickleError("it is cut off")
        if code in b"ILFp" and end - position > LONGEST_NUMBER:
            raise DamagedPickleError(f"it has a number of {end - position} digits")
        if code == 0x70:  # PUT
            text = data[position + 1 : end]
            if not text.isdigit():
                raise DamagedPickleError(f"it uses place {bytes(text)!r} of the memo")
            _check_memo(int(text), position - start)
        return end + 1
    if code == 0x95:  # FRAME
        length = int.from_bytes(data[position + 1 : position + 9], "little")
        if length > len(data) - position:
            raise DamagedPickleError(f"it is cut off, or claims a frame of {length} bytes")
        return position + 9
    if code in _NEVER_WRITTEN:
        raise DamagedPickleError(f"it has {_NEVER_WRITTEN[code]}, which no plain pickle of weights or records needs")
    raise DamagedPickleError(f"byte {position} is no opcode of a pickle")


# What a thing on the stack is as a key of a dict: quickly hashed; a tuple of a few such things; hashed by its identity
# or not at all; slowly hashed; no thing but a mark.
_SHORT, _FLAT, _OTHER, _DEEP, _MARK = range(5)
_PUSHED = {
    **dict.fromkeys(b"N\x88\x89KMJG)", _SHORT),
    **dict.fromkeys(b"]}", _OTHER),
    **dict.fromkeys(b"FIL", _SHORT),
    **dict.fromkeys(b"SVP", _OTHER),
}
_POPPED = {0x61: 1, 0x62: 1, 0x30: 1}  # APPEND, BUILD, POP
_REPLACED = {0x52: 2, 0x93: 2, 0x81: 2, 0x92: 3, 0x51: 1}  # REDUCE ... BINPERSID: how many things one replaces


class _Keys:
    """Follows the stack of an unpickler for what the keys of dicts are; only for pickles that `_measure` accepts."""

    def __init__(self, data: Bytes, start: int, end: int) -> None:
        self.data, self.position, self.end = data, start, end
        self.stack: list[int] = []
        self.memo: dict[int, int] = {}

    def check(self) -> None:
        while self.position < self.end:
            code = self.data[self.position]
            if code in _SIZED:
                self._string(code)
            elif code in _LINES:
                self._lines(code)
            else:
                self._plain(code)
                self.position += 9 if code == 0x95 else 1 + {0x71: 1, 0x72: 4}.get(code, _FIXED.get(code, 0))

    def _string(self, code: int) -> None:
        width = _SIZED[code]
        length = int.from_bytes(self.data[self.position + 1 : self.position + 1 + width], "little")
        longest = 8 if code in b"\x8a\x8b" else LONGEST_KEY  # longer integers could all have one hash
        self.stack.append(_SHORT if length <= longest else _DEEP)
        self.position += 1 + width + length

    def _lines(self, code: int) -> None:
        end = self.position
        for _ in range(_LINES[code]):
            end = self.data.find(b"\n", end + 1)
        text = self.data[self.position + 1 : end]
        if code == 0x67:  # GET
            self.stack.append(self.memo.get(int(text), _OTHER))
        elif code == 0x70:  # PUT
            self.memo[int(text)] = self.stack[-1]
        elif code == 0x69:  # INST
            self._from_mark()
            self.stack.append(_OTHER)
        elif code in b"FIL":
            self.stack.append(_SHORT if len(text) <= 20 else _DEEP)
        else:
            self.stack.append(_SHORT if len(text) <= LONGEST_KEY else _DEEP)
        self.position = end + 1

    def _plain(self, code: int) -> None:
        stack, position = self.stack, self.position
        if code in _PUSHED:
            stack.append(_PUSHED[code])
        elif code == 0x28:
            stack.append(_MARK)
        elif code in b"qr":  # BINPUT, LONG_BINPUT
            width = 1 if code == 0x71 else 4
            self.memo[int.from_bytes(self.data[position + 1 : position + 1 + width], "little")] = stack[-1]
        elif code == 0x94:  # MEMOIZE
            self.memo[len(self.memo)] = stack[-1]
        elif code in b"hj":  # BINGET, LONG_BINGET
            width = 1 if code == 0x68 else 4
            place = int.from_bytes(self.data[position + 1 : position + 1 + width], "little")
            stack.append(self.memo.get(place, _OTHER))
        elif code in _POPPED:
            stack.pop()
        elif code in b"\x85\x86\x87":
            count = code - 0x84
            items = stack[len(stack) - count :]
            del stack[len(stack) - count :]
            self._tuple(items)
        elif code in _REPLACED:
            del stack[len(stack) - _REPLACED[code] :]
            stack.append(_OTHER)
        elif code == 0x73:  # SETITEM
            self._keys([stack[-2]])
            del stack[-2:]
        elif code in b"td1leuo":
            self._marked(code, self._from_mark())

    def _marked(self, code: int, items: list[int]) -> None:
        if code == 0x74:
            self._tuple(items)
        if code in b"du":
            self._keys(items[::2])
        if code in b"dlo":
            self.stack.append(_OTHER)

    def _tuple(self, items: list[int]) -> None:
        is_flat = len(items) <= LONGEST_TUPLE and not any(items)
        self.stack.append(_FLAT if is_flat else _DEEP)

    def _keys(self, items: list[int]) -> None:
        if _DEEP in items:
            raise DamagedPickleError("a dict has a key that is a very long string or number, or a tuple of tuples")

    def _from_mark(self) -> list[int]:
        """What stands on the stack above the last mark; both are taken away."""
        stack, place = self.stack, len(self.stack) - 1
        while stack[place] != _MARK:
            place -= 1
            if place < 0:
                raise IndexError
        items = stack[place + 1 :]
        del stack[place:]
        return items

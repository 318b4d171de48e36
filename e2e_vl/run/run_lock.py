"""One training per run directory."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from detector.errors import UserError

NAME = ".lock"
_NO_LOCK = "is a link, or not a file that a training made; remove it."


class RunLock:
    """Holds a run directory for this process; to be used in a `with` statement.

    The lock is the kernel's (POSIX record lock on the file `.lock`): it ends with this process however it dies, and the
    data workers, which this process forks, do not inherit it. A file that a killed process left does not count.

    Args:
        folder: the run directory, which is made.

    Raises:
        ValueError: another process holds it, the folder cannot be one, or its lock is a link or no file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._handle: int | None = None

    def __enter__(self) -> Self:
        if self.path.parent.exists() and not self.path.parent.is_dir():
            raise UserError(f"{self.path.parent} is a file; choose another `output`, a directory for the run.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while self._handle is None:
            handle = self._open()
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.read(handle, 200).decode(errors="replace").strip()
                os.close(handle)
                by = f"in use by another training ({owner or 'which is just starting'}); wait for it, stop it,"
                is_held = isinstance(error, BlockingIOError | PermissionError)
                reason = by if is_held else f"on a file system without locks ({error}); mount it with locks,"
                raise UserError(f"{self.path.parent} is {reason} or choose another `output`.") from error
            if self._is_at_its_place(handle):
                self._handle = handle
            else:  # its last owner removed it while we were opening it
                os.close(handle)
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        return self

    def _open(self) -> int:
        """The opened file; a link, or a second name of another file, would have that one overwritten."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise UserError(f"{self.path} {_NO_LOCK}") from error
            raise
        found = os.fstat(handle)
        if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
            return handle
        os.close(handle)
        raise UserError(f"{self.path} {_NO_LOCK}")

    def _is_at_its_place(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self.path))  # noqa: PTH116 (beside os.fstat)
        except FileNotFoundError:
            return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.path.unlink(missing_ok=True)  # before others can lock it
        os.close(self._handle)
        self._handle = None

"""Downloads that go on where an earlier call stopped, also from Google Drive, with the optional library gdown."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tqdm import tqdm

RETRIES = 5  # of a transfer that breaks; each goes on where the last one stopped
TIMEOUT = 60.0  # seconds without a byte


def missing_library() -> str:
    """Return how to install gdown if it is not installed, or ""."""
    if importlib.util.find_spec("gdown") is None:
        return 'downloads need gdown; install it with pip install "e2e-vl[download]"'
    return ""


def download_file(address: str, path: Path) -> str:
    """Download a file, going on with the .part that an earlier call left, and return why it failed, or "".

    The file gets its name `path` when it is complete. Only one process at a time may download it.
    """
    reason = missing_library()
    if reason:
        return reason
    import gdown
    import requests

    print(f"Downloading {address}", flush=True)
    try:
        try:
            _download(address, path)
        except gdown.exceptions.DownloadError as error:
            if "byte range" not in str(error):
                raise
            print(f"{address} cannot be continued and begins anew", flush=True)
            for part in path.parent.glob(f"{path.name}????????.part"):
                part.unlink()
            _download(address, path)
    except (gdown.exceptions.DownloadError, requests.RequestException) as error:
        return reason_of(error)
    path.chmod(0o644)  # gdown makes files that only their owner can read
    return ""


def _download(address: str, path: Path) -> None:
    """Download a file with a progress bar. gdown's own output would repeat the same error at each retry."""
    import gdown

    with tqdm(desc=path.name, unit="B", unit_scale=True, delay=1) as bar:

        def show(num_bytes: int, total: int | None) -> None:
            bar.total = total
            bar.update(num_bytes - bar.n)

        gdown.download(
            address,
            str(path),
            quiet=True,
            progress=show,
            resume=True,
            retries=RETRIES,
            timeout=TIMEOUT,
            use_cookies=False,
        )


def try_address(address: str, size: int | None) -> str:
    """Ask a server for a file of `size` bytes, without downloading it.

    The result begins with "answers" if all is well.
    """
    import gdown
    import requests

    try:
        is_google_drive = gdown.parse_url.parse_url(address)[0]
        if is_google_drive:
            file = gdown.download(address, skip_download=True, use_cookies=False, timeout=10)
            return f"answers, {file.path}"
        with requests.get(address, stream=True, timeout=10) as response:
            response.raise_for_status()
            length = int(response.headers.get("Content-Length", size or 0))
    except (gdown.exceptions.DownloadError, requests.RequestException) as error:
        return f"does not answer: {reason_of(error)}"
    if size and length != size:
        return f"has {length:,} bytes instead of {size:,}"
    return "answers"


def reason_of(error: Exception) -> str:
    """Return the message of an error on one line, without the names of connection pools before it."""
    text = " ".join(str(error).split()).rpartition("): ")[2].rstrip("\"'.)")
    return text + ")" * (text.count("(") - text.count(")"))

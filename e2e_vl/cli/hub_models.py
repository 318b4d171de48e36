"""Models of the Hugging Face hub, which `e2e-vl download` fetches into the hub's own cache (HF_HOME)."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import ClassVar

from detector.downloads import try_address
from detector.errors import MissingFileError, first_line
from e2e_vl.registry import Config


class HubModel(Config, frozen=True):
    """The files of a model that training reads: the tokenizer, and weights in the layout of transformers."""

    repository: str  # as the configs name it: the cache has a folder of this name
    files: tuple[str, ...]
    source: str
    gb: float

    needs_gdown: ClassVar[bool] = False

    @property
    def bytes(self) -> int:
        """The approximate size of the download."""
        return int(1e9 * self.gb)

    def paths(self, data: Path) -> dict[Path, None]:
        """Return the folder of the model in the cache, which does not depend on the folder of the data."""
        from huggingface_hub import constants  # late: reads the environment
        from huggingface_hub.file_download import repo_folder_name

        return {Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=self.repository, repo_type="model")): None}

    def problem(self, data: Path, *, with_checksum: bool = False) -> str:
        """Return what the cache lacks; "" if all is there. The hub has verified the files already."""
        from huggingface_hub import try_to_load_from_cache

        [folder] = self.paths(data)
        for name in self.files:
            if not isinstance(try_to_load_from_cache(self.repository, name), str):
                return f"missing: {name} in {folder}"
        return ""

    def fetch(self, name: str, data: Path) -> None:
        """Download what the cache lacks."""
        import huggingface_hub

        huggingface_hub.utils.logging.set_verbosity_error()  # it would print each of its retries
        for file in self.files:
            try:
                huggingface_hub.hf_hub_download(self.repository, file)
            except Exception as error:  # the hub and its HTTP library raise many kinds
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    raise
                raise MissingFileError(
                    f"{name} cannot be fetched from the Hugging Face hub ({first_line(error)}): repeat the command "
                    f"later, or copy {next(iter(self.paths(data)))} from another machine."
                ) from error

    def try_addresses(self) -> dict[str, str]:
        """Ask the hub for each file, without downloading it; answers that begin with "answers" are good."""
        import huggingface_hub

        addresses = [huggingface_hub.hf_hub_url(self.repository, file) for file in self.files]
        return {address: try_address(address, None) for address in addresses}

    def make_links(self, data: Path) -> None:
        """There are none."""

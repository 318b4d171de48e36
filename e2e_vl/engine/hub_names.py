"""Whether names of models on the Hugging Face hub lead anywhere, before a run relies on them."""

from __future__ import annotations

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError

from detector.errors import MissingFileError, first_line
from detector.user_paths import user_path
from e2e_vl.text import looks_like_hub_name

FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "vocab.txt")  # one of which a model has
PATIENCE = 10  # seconds


def is_on_hub(name: str) -> bool:
    """Whether a name of weights or of a vocabulary is to be looked up on the hub; nothing is asked there."""
    return not user_path(name).exists() and looks_like_hub_name(name)


def check_hub_name(name: str) -> None:
    """Ask the hub once for a model of this name, unless a part of it is in the local cache.

    Raises:
        FileNotFoundError: the hub has no such model, or is out of reach.
    """
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in FILES):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, FILES[0]), timeout=PATIENCE)
    except EntryNotFoundError:
        return  # there is such a model, without this file
    except Exception as error:  # errors of the connection are of a library that depends on huggingface_hub's version
        raise MissingFileError(
            f"{name}: neither a local file or folder nor a model within reach on the hub ({first_line(error)}); check "
            "the name and the connection, or give a local file."
        ) from error

"""Files that try to fill the memory or the time, to end the process, or to run code: each a function that writes one.

Each builder gets an empty folder and the path of a canary, and returns the file to read. Code in a file would make the
canary. The names of the builders begin with the kind of file, which says who reads it (`READERS` in `read_hostile.py`).
"""

from __future__ import annotations

from tests.campaign.hostile_archives import TARS, ZIPS
from tests.campaign.hostile_features import NPZ, STORES
from tests.campaign.hostile_images import HARMLESS_IMAGES, IMAGES
from tests.campaign.hostile_parts import Builder, written
from tests.campaign.hostile_tokenizers import TOKENIZERS
from tests.campaign.hostile_weights import ARRAY_PICKLES, PICKLES, SAFETENSORS, STATES, TORCH, code

TABLE: dict[str, dict[str, Builder]] = {
    "weights": {
        **{f"pickle_{name}": written("w.pkl", content) for name, content in {**PICKLES, **ARRAY_PICKLES}.items()},
        **{f"pickle_code_{protocol}": code("w.pkl", protocol) for protocol in (0, 2, 4)},
        **{f"torch_{name}": build for name, build in TORCH.items()},
        **{f"safetensors_{name}": build for name, build in SAFETENSORS.items()},
    },
    "refs": {
        **{f"refs_{name}": written("refs.p", content) for name, content in PICKLES.items()},
        **{f"refs_code_{protocol}": code("refs.p", protocol) for protocol in (0, 2, 4)},
    },
    "features": STORES,
    "npz": {f"npz_{name}": build for name, build in NPZ.items()},
    "boxes": {f"boxes_{name}": build for name, build in NPZ.items() if name in ("empty", "cut_off", "bomb")},
    "image": {f"image_{name}": build for name, build in {**IMAGES, **HARMLESS_IMAGES}.items()},
    "zip": {f"zip_{name}": build for name, build in ZIPS.items()},
    "tar": {f"tar_{name}": build for name, build in TARS.items()},
    "state": {f"state_{name}": build for name, build in STATES.items()},
    "tokenizer": {f"tokenizer_{name}": build for name, build in TOKENIZERS.items()},
}

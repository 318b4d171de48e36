"""`AutoModel.from_pretrained` of transformers knows the encoders of this project after `import e2e_vl`.

Transformers and torch take seconds to import, too long for `--help` and for the check of a setting, and a class must be
imported to be registered. So the encoders are registered at the first call of `AutoConfig.from_pretrained`, which
`AutoModel.from_pretrained` makes, too.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from e2e_vl.parts import ENCODERS

AUTO_CONFIG = "transformers.models.auto.configuration_auto"


def register_encoders() -> None:
    """See above; called once, by `import e2e_vl`."""
    if AUTO_CONFIG in sys.modules:
        _register_at_first_use(sys.modules[AUTO_CONFIG])
    else:
        sys.meta_path.insert(0, _AutoConfigFinder())


def _register_at_first_use(module: ModuleType) -> None:
    auto = module.AutoConfig
    plain = auto.__dict__["from_pretrained"]

    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        auto.from_pretrained = plain
        for part in ENCODERS.values():
            _ = part.cls  # an encoder registers itself when it is imported
        return cls.from_pretrained(*args, **kwargs)

    auto.from_pretrained = classmethod(from_pretrained)


class _AutoConfigFinder(importlib.abc.MetaPathFinder):
    """Waits for the module of `AutoConfig`."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != AUTO_CONFIG:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_wait(module: ModuleType) -> None:
            execute(module)
            _register_at_first_use(module)

        spec.loader.exec_module = execute_and_wait
        return spec

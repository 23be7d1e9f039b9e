"""DDTree speculative decoding with DFlash block-diffusion drafters."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree.accept import Acceptance, SamplingRule, accept_path, choose_tokens
    from ddtree.engine.generate import generate
    from ddtree.tree import DraftTree, TreeError, build_tree

__version__ = "0.1.0"
__all__ = [
    "Acceptance",
    "DraftTree",
    "SamplingRule",
    "TreeError",
    "accept_path",
    "build_tree",
    "choose_tokens",
    "generate",
]

_HOMES = {
    "Acceptance": "ddtree.accept",
    "DraftTree": "ddtree.tree",
    "SamplingRule": "ddtree.accept",
    "TreeError": "ddtree.tree",
    "accept_path": "ddtree.accept",
    "build_tree": "ddtree.tree",
    "choose_tokens": "ddtree.accept",
    "generate": "ddtree.engine.generate",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the command line starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ddtree' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

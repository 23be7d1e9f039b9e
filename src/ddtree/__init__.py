"""DDTree speculative decoding with DFlash block-diffusion drafters."""

from ddtree.accept import Acceptance, SamplingRule, accept_path, choose_tokens
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
]

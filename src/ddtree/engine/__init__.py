"""The reference engine: DDTree, linear DFlash and plain decoding on transformers models."""

from ddtree.engine.generate import Generation, Round, check_request, decode, generate
from ddtree.engine.target import EngineError, load_target

__all__ = [
    "EngineError",
    "Generation",
    "Round",
    "check_request",
    "decode",
    "generate",
    "load_target",
]

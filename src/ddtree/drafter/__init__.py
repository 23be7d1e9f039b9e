"""DFlash drafters: z-lab's checkpoint format, the draft model, and loading."""

from ddtree.drafter.config import DFlashConfig, DrafterError
from ddtree.drafter.load import (
    Drafter,
    config_for_target,
    load_drafter,
    load_weights,
    random_drafter,
    save_drafter,
)
from ddtree.drafter.model import ContextCache, DFlashDraftModel, PackedContext

__all__ = [
    "ContextCache",
    "DFlashConfig",
    "DFlashDraftModel",
    "Drafter",
    "DrafterError",
    "PackedContext",
    "config_for_target",
    "load_drafter",
    "load_weights",
    "random_drafter",
    "save_drafter",
]

"""`ddtree-cpu`: an out-of-tree SGLang platform on plain PyTorch.

Serves an unmodified SGLang (no algorithm, DFLASH, DDTREE) on a machine without an accelerator.
This module is imported by every SGLang process, so it imports nothing but the standard library
until the platform is really activated.
"""

from __future__ import annotations

import os

PLATFORM_NAME = "ddtree-cpu"
ATTENTION_BACKEND = "ddtree_sdpa"
_PLATFORM_CLASS = "ddtree.sglang.cpu.platform:DDTreeCpuPlatform"


def activate() -> str | None:
    """Entry point of group `sglang.srt.platforms`: the platform class, or None to stay out.

    Activates when asked (`SGLANG_PLATFORM=ddtree-cpu`) or when the machine has no accelerator and
    SGLang's own CPU engine was not chosen (`SGLANG_USE_CPU_ENGINE=1`).
    """
    if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        return _PLATFORM_CLASS
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None

    import torch

    return None if torch.accelerator.is_available() else _PLATFORM_CLASS

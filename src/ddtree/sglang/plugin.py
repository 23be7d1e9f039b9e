"""Entry point of group `sglang.srt.plugins`: called early in every SGLang process."""

from __future__ import annotations


def register() -> None:
    """Make the algorithm `DDTREE` known to SGLang."""

"""Entry point of group `sglang.srt.plugins`: called early in every SGLang process."""

from __future__ import annotations


def register() -> None:
    """Make the algorithm `DDTREE` known to SGLang; nothing else changes until it is selected."""
    from ddtree.sglang.algorithm import register_algorithm

    register_algorithm()

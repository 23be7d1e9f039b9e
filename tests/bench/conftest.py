"""A tiny target with a tokenizer, its untrained drafter, and prompts for both."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

PROMPTS = ("the tree", "the path of the target", "a drafter", "the target of the drafter")


@dataclass(frozen=True)
class TinyPair:
    """Folders of a target and a drafter, and a JSONL of prompts."""

    target: Path
    drafter: Path
    prompts: Path


@pytest.fixture(scope="session")
def tiny_pair(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    import torch
    from transformers import AutoModelForCausalLM

    from ddtree.drafter import random_drafter, save_drafter

    drafter = random_drafter(AutoModelForCausalLM.from_pretrained(tiny_target), block_size=6)
    folder = tmp_path_factory.mktemp("bench")
    save_drafter(drafter.model, drafter.config, folder / "drafter", torch.float32)
    prompts = folder / "prompts.jsonl"
    lines = (json.dumps({"prompt": text}) + "\n" for text in PROMPTS)
    prompts.write_text("".join(lines), encoding="utf-8")
    return TinyPair(tiny_target, folder / "drafter", prompts)

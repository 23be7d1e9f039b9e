"""Settings of the DDTREE algorithm that have no SGLang flag, read once from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_TRUE = {"1": True, "true": True, "0": False, "false": False, "": False}


@dataclass(frozen=True)
class Settings:
    """What `DDTREE_*` variables choose.

    Attributes:
        chain_seed: `DDTREE_CHAIN_SEED`, keep the drafter's argmax chain in every tree.
        log_rounds: `DDTREE_LOG_ROUNDS`, log the mean time of each stage of a round and one tree,
            summary, tokens and parents, every so many rounds; 0 is off. Reading a tree synchronises
            the device.
    """

    chain_seed: bool = False
    log_rounds: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Parse and validate.

        Raises:
            ValueError: a variable holds something else than its type allows.
        """
        return cls(
            chain_seed=_boolean(environment, "DDTREE_CHAIN_SEED"),
            log_rounds=_count(environment, "DDTREE_LOG_ROUNDS"),
        )


def _boolean(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "").strip().lower()
    if text not in _TRUE:
        raise ValueError(f"{name} is {text!r}; it must be 0 or 1")
    return _TRUE[text]


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0").strip() or "0"
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; it must be a whole number, 0 or more")
    return int(text)

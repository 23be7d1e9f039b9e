"""Settings of the DDTREE algorithm that have no SGLang flag, read once from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

FIXED, AUTO = "fixed", "auto"
_TRUE = {"1": True, "true": True, "0": False, "false": False, "": False}


@dataclass(frozen=True)
class Settings:
    """What `DDTREE_*` variables choose.

    Attributes:
        budget: `DDTREE_BUDGET`; ``fixed`` verifies trees of the launch width in every round,
            ``auto`` chooses the width of every round up to it, plain decoding included.
        chain_seed: `DDTREE_CHAIN_SEED`, keep the drafter's argmax chain in every tree.
        log_rounds: `DDTREE_LOG_ROUNDS`, log the mean time of each stage of a round and one tree,
            summary, tokens and parents, every so many rounds; 0 is off. Reading a tree synchronises
            the device.
    """

    budget: str = FIXED
    chain_seed: bool = False
    log_rounds: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Parse and validate.

        Raises:
            ValueError: a variable holds something else than its type allows, or two exclude each
                other.
        """
        settings = cls(
            budget=_choice(environment, "DDTREE_BUDGET", (FIXED, AUTO)),
            chain_seed=_boolean(environment, "DDTREE_CHAIN_SEED"),
            log_rounds=_count(environment, "DDTREE_LOG_ROUNDS"),
        )
        if settings.budget == AUTO and settings.chain_seed:
            raise ValueError(
                "DDTREE_CHAIN_SEED is 1 and DDTREE_BUDGET is 'auto', which chooses between chain "
                "and trees by itself; set one of them only"
            )
        return settings


def _boolean(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "").strip().lower()
    if text not in _TRUE:
        raise ValueError(f"{name} is {text!r}; it must be 0 or 1")
    return _TRUE[text]


def _choice(environment: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    text = environment.get(name, "").strip().lower() or choices[0]
    if text not in choices:
        raise ValueError(f"{name} is {text!r}; it must be {' or '.join(choices)}")
    return text


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0").strip() or "0"
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; it must be a whole number, 0 or more")
    return int(text)

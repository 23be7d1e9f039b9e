"""Target, drafter and prompt, from what the user named or from the defaults."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ddtree.cli.errors import CommandError

UNTRAINED = "random"
UNTRAINED_NOTE = "the drafter is untrained: it guesses at random, so tau stays near 1"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer and the drafter bound to it (None in mode ``ar``).

    `eos` holds the tokens that end an answer.
    """

    target: Any
    tokenizer: Any
    drafter: Any
    target_name: str
    drafter_name: str | None
    eos: frozenset[int]

    @property
    def trained(self) -> bool:
        return self.drafter_name != UNTRAINED

    def input_ids(self, prompt: str, raw: bool) -> list[int]:
        """The prompt as tokens, in the target's chat template unless `raw`."""
        if raw:
            return self.tokenizer.encode(prompt)
        if not self.tokenizer.chat_template:
            raise CommandError(
                f"the tokenizer of {self.target_name} has no chat template; add --raw"
            )
        messages = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer.encode(text, add_special_tokens=False)


def open_pair(
    console: Console,
    target: str | None,
    drafter: str | None,
    *,
    dtype: str | None,
    device: str | None,
    drafts: bool = True,
    untrained_if_none: bool = False,
) -> Pair:
    """Load a target and its drafter, showing what takes time on `console`.

    Args:
        target: folder or hub id; the default target, prepared on first use, when None.
        drafter: folder, hub id or `UNTRAINED`; the shipped one when None.
        dtype, device: the engine's choice when None.
        drafts: False to load no drafter.
        untrained_if_none: fall back to an untrained drafter where none is shipped, and say so.
    """
    where, kind = _device(device), _dtype(dtype)
    drafter = _drafter_name(drafter, target, untrained_if_none) if drafts else None
    from transformers.utils import logging

    from ddtree.engine import load_target

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = target or str(default_target(console))
    with working(console, f"loading target {folder}"):
        model, tokenizer = load_target(folder, dtype=kind, device=where)
    bound = None
    if drafter is not None:
        with working(console, f"loading drafter {drafter}"):
            bound = _bind(drafter, model)
    if drafter == UNTRAINED:
        console.print(f"[yellow]note:[/] {UNTRAINED_NOTE}", highlight=False)
    eos = end_of_answer(model, tokenizer)
    return Pair(model, tokenizer, bound, folder, drafter, eos)


def default_target(console: Console, out: Path | None = None) -> Path:
    """The default target's folder, prepared on first use."""
    from ddtree.engine import default_target

    with working(
        console, f"default target {default_target.NAME} (prepared on first use: a 90 MB download)"
    ):
        return default_target.prepare_default_target(out)


def end_of_answer(model: Any, tokenizer: Any) -> frozenset[int]:
    """The generation configuration's end-of-sequence tokens and the tokenizer's own."""
    config = getattr(model, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    ids = list(ids) if isinstance(ids, list | tuple) else [ids]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)


def read_prompt(prompt: str | None, file: Path | None, default: str | None = None) -> str:
    """The prompt from `--prompt` or `--prompt-file` (``-`` for standard input).

    Raises:
        CommandError: none or both are given, the file cannot be read, or it is empty.
    """
    if prompt is not None and file is not None:
        raise CommandError("--prompt and --prompt-file are both given; keep one")
    text = default if prompt is None else prompt
    if file is not None:
        try:
            text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise CommandError(f"the prompt file {file} cannot be read: {reason}") from None
    if text is None:
        raise CommandError("there is no prompt; give --prompt TEXT or --prompt-file FILE")
    if not text.strip():
        raise CommandError("the prompt is empty; write at least one word")
    return text


@contextmanager
def working(console: Console, what: str) -> Iterator[None]:
    """Say what takes time: a spinner in a terminal, a line elsewhere."""
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(what, markup=False, highlight=False, soft_wrap=True)
        yield


def _bind(drafter: str, model: Any) -> Any:
    from ddtree.drafter import load_drafter, random_drafter

    if drafter == UNTRAINED:
        return random_drafter(model)
    return load_drafter(drafter, target=model)


def _drafter_name(drafter: str | None, target: str | None, untrained_if_none: bool) -> str:
    from ddtree.drafter.shipped import shipped_drafter

    if drafter is not None:
        return drafter
    shipped = shipped_drafter() if target is None else None
    if shipped is not None:
        return str(shipped)
    if untrained_if_none:
        return UNTRAINED
    whose = f"the target {target}" if target else "the default target in this installation"
    raise CommandError(
        f"no drafter is shipped for {whose}; name one with --drafter, "
        f"use --drafter {UNTRAINED} for an untrained one, or --mode ar for none"
    )


def _device(name: str | None) -> str:
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        raise CommandError(f"device is {name!r}, which torch cannot use here; try cpu") from None
    return name


def _dtype(name: str | None) -> Any:
    import torch

    if name is None:
        return None
    if name not in DTYPES:
        raise CommandError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)}")
    return getattr(torch, name)

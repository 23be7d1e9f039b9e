"""Tokens as people read them: text as it streams, and a label for one token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_REPLACEMENT = "\ufffd"
_VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥"})


class TextStream:
    """Decodes tokens as they come; text appears once its last byte has.

    A character may span tokens, and the text of a token depends on those before it (leading
    spaces, byte fragments). So a few tokens are decoded again each time, with and without the
    new one, and what is new is passed on.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = self._shown = 0

    def push(self, tokens: Iterable[int]) -> str:
        """The text these tokens complete; it may be empty."""
        self._tokens.extend(tokens)
        text = self._decode(len(self._tokens))
        if text.endswith(_REPLACEMENT):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """What was held back for bytes that never came."""
        return self._take(self._decode(len(self._tokens)))

    def _take(self, text: str) -> str:
        new = text[len(self._decode(self._shown)) :]
        self._start, self._shown = self._shown, len(self._tokens)
        return new

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(
            self._tokens[self._start : end],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )


def token_label(tokenizer: Any, token: int) -> str:
    """One token, visibly: spaces as ``·``, line ends as ``⏎``, byte fragments as ``#id``."""
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    piece = tokenizer.convert_ids_to_tokens(token) or ""
    if piece.startswith("▁") and not text.startswith(" "):
        text = " " + text  # a tokenizer that drops the space at the start of a text
    text = text.translate(_VISIBLE)
    return text if text and text.isprintable() and _REPLACEMENT not in text else f"#{token}"

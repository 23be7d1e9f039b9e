"""The verify input of a draft tree, and the decode-time state carried between rounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """A target-verify forward over `draft_token_num` = width tree nodes per request.

    Attributes:
        visibility: ancestor-or-self, bool [B, N, N]; read by `ddtree_sdpa`. Backends that know
            only SGLang's flat mask get the same content as `custom_mask`.
        parents: int64 [B, N], -1 for roots; read by recurrent layers.
    """

    visibility: torch.Tensor | None = None
    parents: torch.Tensor | None = None


@dataclass
class DDTreeDraftInput(DFlashDraftInputV2):
    """The committed state a round starts from; reserves K/V for the next one.

    A round writes two windows that start at the committed length: the draft block and the verify
    window. `window` is the longer of the two.
    """

    window: int = 0

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve slots for two windows, because under overlap the host lags by one round."""
        with get_spec().override(speculative_num_draft_tokens=self.window):
            super().prepare_for_decode(batch)

    @classmethod
    def create(
        cls, *, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor, window: int
    ) -> DDTreeDraftInput:
        """State after a prefill or a round: int64 [B] last committed tokens and lengths."""
        batch, device = new_seq_lens.shape[0], bonus_tokens.device
        return cls(
            topk_p=torch.empty((batch, 0), device=device),
            topk_index=torch.empty((batch, 0), dtype=torch.int64, device=device),
            bonus_tokens=bonus_tokens.to(torch.int64),
            new_seq_lens=new_seq_lens.to(torch.int64),
            hidden_states=torch.empty((batch, 0), device=device),
            window=window,
        )


def flat_tree_mask(
    visibility: torch.Tensor, prefix_lens: torch.Tensor, capacity: int
) -> torch.Tensor:
    """SGLang's flat verify mask: request after request, rows of [prefix + N] booleans.

    Only the tree part is written per node; the prefix is all True. No device sync.

    Args:
        visibility: bool [B, N, N].
        prefix_lens: int64 [B].
        capacity: at least ``sum(prefix_lens)``, known on the host.
    Returns:
        bool [N * capacity + B * N * N].
    """
    batch, width, _ = visibility.shape
    mask = torch.ones(
        width * capacity + batch * width * width, dtype=torch.bool, device=visibility.device
    )
    row_lens = prefix_lens + width
    starts = (row_lens.cumsum(0) - row_lens) * width
    nodes = torch.arange(width, device=visibility.device)
    rows = starts[:, None] + nodes * row_lens[:, None]  # [B, N]
    index = rows[:, :, None] + prefix_lens[:, None, None] + nodes
    return mask.scatter_(0, index.flatten(), visibility.flatten())

"""The algorithm `DDTREE` as SGLang knows it: arguments, refusals, and what it answers to."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.platforms import current_platform
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from ddtree.sglang.launch import resolve_arguments

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap

logger = logging.getLogger(__name__)
NAME = "DDTREE"


class DDTreeAlgorithm(CustomSpecAlgo):
    """DDTREE answers every question of SGLang's branches as DFLASH does, apart from the widths."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        """The relay of values between overlapped rounds; the base class has none to offer."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in what follows from the drafter and refuse what cannot be served."""
        resolve_arguments(server_args, current_platform)

    def resolve_max_speculative_num_draft_tokens(self, server_args: Any) -> int | None:
        """The longer of the verify window and the draft block: what a round may allocate."""
        widths = (
            server_args.speculative_num_draft_tokens,
            server_args.speculative_dflash_block_size,
        )
        return max((width for width in widths if width is not None), default=None)


def register_algorithm() -> None:
    """Register `DDTREE` unless this SGLang has an algorithm of that name."""
    if NAME in SpeculativeAlgorithm.__members__:
        logger.warning(
            "This SGLang has its own algorithm %s; the one of sglang-ddtree is not used. Uninstall "
            "sglang-ddtree or set SGLANG_PLUGINS to leave it out.",
            NAME,
        )
        return
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=DDTreeAlgorithm)(
        _worker_class
    )


def _worker_class(server_args: Any) -> type:
    """Called in each scheduler process once the algorithm is really used."""
    from ddtree.sglang.compat import check_installed_release, install_tree_hooks
    from ddtree.sglang.worker import DDTreeWorker

    check_installed_release()
    install_tree_hooks()
    return DDTreeWorker

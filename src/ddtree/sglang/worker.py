"""The DDTREE worker: DFLASH's prefill and drafter, a tree instead of a chain.

A decode round is `draft -> build -> verify -> accept -> commit`, batched over requests, without a
host synchronisation. The scheduler's v2 schema: the worker publishes the new lengths as soon as
they are known on the device and hands over the state of the next round, so overlap scheduling
works unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.model_executor.model_runner import SamplingPrewarmResult
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2, _selector_lattice
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import _verify_commit_step_indices, draft_tp_context

from ddtree.accept import Acceptance, accept_path
from ddtree.budget import CHAIN, TREE, Arm
from ddtree.conditional import (
    ConditionalHead,
    DominoHead,
    SelectorHead,
    build_conditional_tree,
)
from ddtree.engine.calibrate import machine_costs
from ddtree.sglang.choose import adjust_logits, choose_node_tokens
from ddtree.sglang.draft_model import keep_embedding_dtype
from ddtree.sglang.grammar import NodeMasks, constrain
from ddtree.sglang.observe import RoundLog
from ddtree.sglang.penalties import PathPenalties
from ddtree.sglang.settings import AUTO, Settings
from ddtree.sglang.shard import VocabularyShard
from ddtree.sglang.verify import DDTreeDraftInput, DDTreeVerifyInput, flat_tree_mask
from ddtree.sglang.widths import WidthChooser
from ddtree.tree import DraftTree, build_chain, root_tree, tree_of_tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Window:
    """Where one round writes: slots and positions from the committed lengths on."""

    prefix_lens: torch.Tensor  # int64 [B]
    slots: torch.Tensor  # virtual KV slots, int64 [B, window]
    plan: KVLocPlan
    host_lens: torch.Tensor | None  # committed lengths the host knows, CPU, or None
    reserved_lens: torch.Tensor | None  # upper bounds the host reserved, CPU, or None

    def host_bound(self, tokens: int) -> torch.Tensor:
        """Per request, an upper bound on its K/V length after `tokens` more: int [B] on the CPU."""
        if self.host_lens is not None:
            return self.host_lens + tokens
        assert self.reserved_lens is not None, "neither lengths nor reservations are on the host"
        return self.reserved_lens


class DDTreeWorker(DFlashWorkerV2):
    """Drives target and drafter for `--speculative-algorithm DDTREE`."""

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        spec = get_spec()
        self.width = int(spec.speculative_num_draft_tokens)
        self._draft_width = int(spec.speculative_dflash_block_size)
        self.settings = Settings.from_environment()
        # DFLASH knows one number; for everything that concerns the drafter it is the block size.
        with self._drafter_spec():
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.speculative_num_draft_tokens = self.width
        self.window = max(self.width, self.block_size)
        self.rounds = RoundLog(self.settings.log_rounds, self.device)
        self._vocab = int(self.model_runner.model_config.vocab_size)
        self.vocabulary = VocabularyShard(self.model_runner.model.lm_head, self._vocab)
        if self.selector is not None:
            self.draft_model.lm_head = unwrap_lora_layer(self.model_runner.model.lm_head)
        keep_embedding_dtype(self.draft_model)
        self._wants_flat_mask = True
        self._fixed = Arm(TREE, self.width)
        self.widths = self._width_chooser(server_args) if self.settings.budget == AUTO else None
        if get_parallel().tp_rank == 0:
            logger.info(
                "DDTREE ready: target=%s, drafter=%s, width=%d (budget %d, %s), block size=%d, "
                "mask token=%d, chain seed=%s",
                target_worker.model_runner.model_config.model_path,
                self.draft_model_runner.model_config.model_path,
                self.width,
                self.width - 1,
                self.settings.budget,
                self.block_size,
                self._mask_token_id,
                self.settings.chain_seed,
            )

    def _width_chooser(self, server_args: ServerArgs) -> WidthChooser:
        prior = machine_costs(
            self.model_runner.model_config.model_path,
            self.draft_model_runner.model_config.model_path,
            self.device,
            self.model_runner.dtype,
        )
        return WidthChooser(
            self.width, self.block_size, prior, self.device, metrics=server_args.enable_metrics
        )

    @contextmanager
    def _drafter_spec(self) -> Iterator[None]:
        """Within this scope SGLang's configuration describes the drafter's block."""
        with get_spec().override(speculative_num_draft_tokens=self._draft_width):
            yield

    def init_attention_backends(self) -> None:
        """Build the drafter's backend with the block size as its verify width."""
        with self._drafter_spec():
            super().init_attention_backends()
        slots = self.model_runner.req_to_token_pool.req_to_token.shape[0]
        self.penalties = PathPenalties(slots, self._vocab, self.device)
        backend = self.model_runner.attn_backend
        self._wants_flat_mask = not getattr(backend, "reads_tree_visibility", False)

    def init_cuda_graphs(self) -> None:
        """Capture the drafter's graphs over blocks."""
        with self._drafter_spec():
            super().init_cuda_graphs()

    def prewarm_sampling(self) -> SamplingPrewarmResult:
        """The target's own rehearsal; DFLASH's chain buffers are not used here."""
        return self.model_runner.prewarm_sampling()

    def _maybe_build_draft_sampler(self) -> None:
        """A tree needs the block's distributions, so no greedy head is folded into the graph."""
        return

    def _validate_phase1_sampling_support(self, batch: ScheduleBatch) -> None:
        """Sampling is exact here, on every device: nothing to warn about."""

    def _make_next_draft_input_prefill(
        self, *, bonus_tokens: torch.Tensor, seq_lens: torch.Tensor
    ) -> DDTreeDraftInput:
        return DDTreeDraftInput.create(
            bonus_tokens=bonus_tokens, new_seq_lens=seq_lens, window=self.window
        )

    def _make_next_draft_input_decode(
        self, *, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor
    ) -> DDTreeDraftInput:
        return self._make_next_draft_input_prefill(bonus_tokens=bonus_tokens, seq_lens=new_seq_lens)

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Prefill as DFLASH does it; decode by one round of DDTREE."""
        extends = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if extends or batch.forward_mode.is_idle():
            result = super().forward_batch_generation(
                batch, on_publish, grammar_barrier, pp_proxy_tensors
            )
            if extends and not batch.forward_mode.is_idle():
                self.penalties.begin(batch, result.next_token_ids)
            if self.widths is not None:
                self.widths.interrupt()
            return result
        return self._round(batch, on_publish, grammar_barrier)

    def _round(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> GenerationBatchResult:
        device_module = torch.get_device_module(self.device)
        batch.seq_lens.record_stream(device_module.current_stream())
        root_tokens = batch.spec_info.bonus_tokens.view(-1)
        stage = self.rounds.stage
        with stage("draft"):
            window = self._open_window(batch)
            arm = self._next_arm(window)
            scores = self._score(batch, window, root_tokens) if arm.drafts else None
        with stage("build"):
            built = self._build(arm, scores, root_tokens)
            masks = None
            if batch.has_grammar:
                built, masks = self._constrain(batch, built, arm, scores, grammar_barrier)
            tree = built if arm.width >= built.width else built.first(arm.width)
        with stage("verify"):
            verified = self._verify(batch, window, tree)
        with stage("accept"):
            chosen = self._choose(batch, window, tree, verified.logits_output, masks)
            acceptance = accept_path(tree, chosen)
            new_seq_lens = window.prefix_lens + acceptance.lengths
        if on_publish is not None:
            on_publish(new_seq_lens)
        with stage("commit"):
            result = self._commit(batch, window, arm, verified, chosen, acceptance, new_seq_lens)
        self.rounds.finish(tree)
        if self.widths is not None:
            self.widths.launched(built, acceptance.path)
        return result

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """The scheduler has a round's results on the host: they go into the next choice."""
        if self.widths is not None:
            self.widths.finished(batch_size)

    def _next_arm(self, window: Window) -> Arm:
        """How to run this round: by the launch width, or as the controller says."""
        if self.widths is None:
            return self._fixed
        return self.widths.choose(len(window.slots), context=int(window.host_bound(0).sum()))

    def _build(
        self, arm: Arm, scores: torch.Tensor | ConditionalHead | None, root_tokens: torch.Tensor
    ) -> DraftTree:
        """The round's trees; a best-first tree always at the launch width.

        Its first nodes are the tree of any smaller width, and the others tell what a larger one
        could bring.
        """
        budget = self.width - 1
        if scores is None:
            return root_tree(root_tokens)
        if not isinstance(scores, torch.Tensor):
            return build_conditional_tree(scores, root_tokens, budget)
        if arm.kind == CHAIN:
            return build_chain(scores[:, : arm.width - 1], root_tokens)
        return tree_of_tokens(
            self.vocabulary.top_tokens(scores, budget),
            root_tokens,
            budget,
            chain_seed=self.settings.chain_seed,
        )

    def _constrain(
        self,
        batch: ScheduleBatch,
        tree: DraftTree,
        arm: Arm,
        scores: torch.Tensor | ConditionalHead | None,
        barrier: Callable[[], None] | None,
    ) -> tuple[DraftTree, NodeMasks]:
        """The batch's trees within its requests' grammars, and what these allow at each node."""
        if barrier is not None:
            barrier()  # the matchers read the tokens of the round before
        # Otherwise the mask that is left from the prefill could be applied again.
        batch.sampling_info.grammar_mask = None
        return constrain(
            tree, batch.reqs, scores, self.vocabulary, self._vocab, chain=arm.kind == CHAIN
        )

    def _open_window(self, batch: ScheduleBatch) -> Window:
        """Look up the slots this round writes and plan them once for all its forwards."""
        prefix_lens = batch.seq_lens
        slots = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            start_offset=prefix_lens,
            end_offset=prefix_lens + self.window,
            batch_size=len(prefix_lens),
            draft_token_num=self.window,
            device=self.device,
        )
        reserved = batch.spec_info.nxt_kv_lens_cpu
        plan = self.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix_lens,
            seq_lens_cpu=batch.seq_lens_cpu if batch.seq_lens_cpu is not None else reserved,
            write_virtual=slots,
            read_extent=self.window,
        )
        return Window(
            prefix_lens=prefix_lens.to(torch.int64),
            slots=slots.view(-1, self.window),
            plan=plan,
            host_lens=batch.seq_lens_cpu,
            reserved_lens=reserved,
        )

    def _draft(
        self, batch: ScheduleBatch, window: Window, root_tokens: torch.Tensor
    ) -> torch.Tensor:
        """One pass of the drafter over ``[root, mask, ..., mask]``: hidden [B, block - 1, H]."""
        blocks = root_tokens.new_full((len(root_tokens), self.block_size), self._mask_token_id)
        blocks[:, 0] = root_tokens
        with (
            torch.inference_mode(),
            self._drafter_spec(),
            draft_tp_context(self.draft_parallel_layout),
        ):
            forward_batch = self._draft_batch(batch, window, blocks)
            output = self.draft_model_runner.forward(forward_batch).logits_output
        # Every slot predicts itself; a Domino drafter may predict the token after its slot.
        first = 0 if self.draft_model.shift_label else 1
        hidden = output.hidden_states.view(*blocks.shape, -1)
        return hidden[:, first : first + self.block_size - 1]

    def _score(
        self, batch: ScheduleBatch, window: Window, root_tokens: torch.Tensor
    ) -> torch.Tensor | ConditionalHead:
        """What the drafter's head says of one pass over a block.

        Returns:
            Logits [B, block - 1, V'] of this rank's part of the vocabulary, or conditional scores.
        """
        hidden = self._draft(batch, window, root_tokens)
        model = self.draft_model
        if self.selector is not None:
            return SelectorHead(*_selector_lattice(model, hidden, root_tokens))
        logits = self.vocabulary.head_logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        if not self._is_domino:
            return logits
        return DominoHead(logits, hidden, model.prefix_gru, model.embed_proj, self._embedding)

    @property
    def _embedding(self) -> torch.nn.Module:
        """The target's, which the drafter reads tokens with."""
        return unwrap_lora_layer(self.target_worker.model_runner.model.get_input_embeddings())

    def _draft_batch(
        self, batch: ScheduleBatch, window: Window, blocks: torch.Tensor
    ) -> ForwardBatch:
        tokens = blocks.numel()
        host_lens = window.host_bound(self.block_size)
        positions = window.prefix_lens[:, None] + self._block_pos_offsets
        embeds = self._embedding(blocks).flatten(0, 1)
        if self._noise_embed_scale != 1.0:
            embeds = embeds * self._noise_embed_scale
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(blocks),
            input_ids=blocks.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=None,
            seq_lens_sum=int(host_lens.sum()),
            seq_lens_cpu=host_lens.to(torch.int32),
            positions=positions.flatten(),
            input_embeds=embeds,
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=(
                torch.full((), tokens, dtype=torch.int32, device=self.device)
                if enable_num_token_non_padded()
                else None
            ),
            global_num_token_non_padded_cpu=tokens,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        window.plan.bind(
            forward_batch,
            self.draft_model_runner.kv_index_translator,
            cols=slice(0, self.block_size),
        )
        return forward_batch

    def _verify(
        self, batch: ScheduleBatch, window: Window, tree: DraftTree
    ) -> GenerationBatchResult:
        """One forward of the target over every node, positions by depth, ancestors only."""
        visibility = tree.visibility()
        host_lens = window.host_bound(tree.width)
        verify_input = DDTreeVerifyInput(
            draft_token=tree.tokens.flatten(),
            positions=tree.positions(window.prefix_lens).flatten(),
            draft_token_num=tree.width,
            visibility=visibility,
            parents=tree.parents,
            custom_mask=(
                flat_tree_mask(visibility, window.prefix_lens, int(host_lens.sum()))
                if self._wants_flat_mask
                else None
            ),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=window.plan,
            kv_loc_cols=slice(0, tree.width),
        )
        batch.out_cache_loc = window.slots[:, : tree.width].flatten()
        lens, lens_sum = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu, batch.seq_lens_sum = host_lens, int(host_lens.sum())
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = lens, lens_sum
        return self.target_worker.forward_batch_generation(
            batch=None,
            forward_batch=forward_batch,
            is_verify=True,
            skip_attn_backend_init=True,
        )

    def _full_logits(self, output: LogitsProcessorOutput) -> torch.Tensor:
        """Verify logits [B * N, V], gathered over the tensor-parallel ranks."""
        processor = self._target_logits_processor
        if processor is not None and processor.is_deferred_shard(output.next_token_logits):
            output.next_token_logits = processor.finish_deferred_gather(output.next_token_logits)
        return output.next_token_logits

    def _choose(
        self,
        batch: ScheduleBatch,
        window: Window,
        tree: DraftTree,
        output: LogitsProcessorOutput,
        masks: NodeMasks | None,
    ) -> torch.Tensor:
        """The target's token at every node, int64 [B, N], the same on every rank."""
        logits = self._full_logits(output)
        info = batch.sampling_info
        self.penalties.apply(batch, tree, logits)
        mask = None if masks is None else masks.first(tree.width, self.device)
        adjust_logits(logits, info, tree, mask)
        positions = tree.positions(window.prefix_lens).flatten()
        sampler = self.target_worker.model_runner.sampler
        chosen = choose_node_tokens(logits, info, positions, tree.width, sampler)
        greedy = info is None or info.is_all_greedy
        site = (
            SpecTpSyncSite.DFLASH_ACCEPT_GREEDY if greedy else SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
        )
        self._tp_sync.sync(site, chosen)
        return chosen

    def _commit(
        self,
        batch: ScheduleBatch,
        window: Window,
        arm: Arm,
        verified: GenerationBatchResult,
        chosen: torch.Tensor,
        acceptance: Acceptance,
        new_seq_lens: torch.Tensor,
    ) -> GenerationBatchResult:
        """Make the accepted path the committed text: K/V rows, draft K/V, output tokens."""
        output, width = verified.logits_output, chosen.shape[1]
        # Past the accepted nodes a path points at its own place: a move of a row onto itself.
        places = torch.arange(acceptance.path.shape[1], device=chosen.device)
        path = torch.where(acceptance.path >= 0, acceptance.path, places)[:, :width]
        commit_lens = acceptance.lengths.to(torch.int32)
        rows = torch.arange(len(path), device=path.device)[:, None] * width + path
        if arm.kind == TREE:  # a chain's rows, and a lone root's, lie in their places
            self._move_accepted_rows(window, path)
        self._commit_states(batch, rows, commit_lens, width)
        self._extend_draft_cache(window, output.hidden_states, path, commit_lens)
        output.hidden_states = None
        # Up to its end, an accepted path's tokens are the target's choices along it.
        committed = chosen.gather(1, path)
        self.penalties.commit(batch, committed, commit_lens)
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, chosen.flatten(), accept_index=rows)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=committed.flatten(),
            accept_lens=commit_lens,
            can_run_cuda_graph=verified.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=acceptance.next_tokens, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=width,
            speculative_output_stride=path.shape[1],
            new_seq_lens=new_seq_lens,
            routed_experts_output=verified.routed_experts_output,
            indexer_topk_output=verified.indexer_topk_output,
        )

    def _move_accepted_rows(self, window: Window, path: torch.Tensor) -> None:
        """Bring the target's K/V of the accepted nodes to the front of the window."""
        translator = self.model_runner.kv_index_translator
        slots = window.plan.write_ids(translator).view_as(window.slots)
        self.model_runner.token_to_kv_pool.move_kv_cache(
            slots[:, : path.shape[1]].flatten(), slots.gather(1, path).flatten()
        )

    def _commit_states(
        self, batch: ScheduleBatch, rows: torch.Tensor, commit_lens: torch.Tensor, width: int
    ) -> None:
        """Make recurrent layers' states those after the last accepted node, if there are any."""
        if not self._need_mamba_verify_commit:
            return
        nodes, tracked = _verify_commit_step_indices(
            batch=batch, accept_index=rows, accept_lens=commit_lens, draft_token_num=width
        )
        self.model_runner.attn_backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=nodes,
            mamba_track_indices=batch.mamba_track_indices,
            mamba_steps_to_track=tracked,
            model=self.model_runner.model,
        )

    def _extend_draft_cache(
        self,
        window: Window,
        hidden: torch.Tensor,
        path: torch.Tensor,
        commit_lens: torch.Tensor,
    ) -> None:
        """Write draft K/V for exactly the accepted nodes, at their final slots and positions."""
        batch, places = path.shape
        features = hidden.view(batch, -1, hidden.shape[-1])
        features = features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))
        slots = self._draft_write_ids(window.plan).view_as(window.slots)[:, :places].contiguous()
        positions = window.prefix_lens[:, None] + torch.arange(places, device=path.device)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=features.flatten(0, 1),
            cache_loc=slots.flatten(),
            cache_loc_2d=slots,
            positions=positions.flatten(),
            commit_lens=commit_lens,
        )

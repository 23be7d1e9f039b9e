"""Triton kernels for the two costly steps of `build_tree` on a GPU.

They replace `tree._vocabulary_pass` and `tree._search_levels` for CUDA tensors where Triton can be
imported; everything else stays in torch. Results do not depend on the batch: a program handles a
fixed segment of one row, or one request. Both kernels were compiled for sm_80 and sm_90 and run
under Triton's interpreter only (`TRITON_INTERPRET=1`, see tests/test_tree_cuda.py), never on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Chunks per program of the vocabulary pass: 4096 elements, which fit its registers.
_SEGMENT_CHUNKS = 128


def vocabulary_pass(rows: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Chunk maxima, row maxima and log(sum(exp(row - row maximum))), reading the logits once.

    Args:
        rows: float [R, V], contiguous, V a multiple of `chunk`.
        chunk: elements per chunk, a power of two.
    Returns:
        float32 [R, V / chunk], [R, 1], [R, 1]. NaN log-sums where a row holds NaN or +inf.
    """
    count, vocab = rows.shape
    chunks = vocab // chunk
    segments = triton.cdiv(chunks, _SEGMENT_CHUNKS)
    chunk_max = torch.empty(count, chunks, dtype=torch.float32, device=rows.device)
    peaks, sums = torch.empty(2, count, segments, dtype=torch.float32, device=rows.device)
    _segment_kernel[(count, segments)](
        rows, chunk_max, peaks, sums, chunks, CHUNK=chunk, CHUNKS=_SEGMENT_CHUNKS, num_warps=4
    )
    row_max = peaks.amax(-1, keepdim=True)
    total = (sums * torch.exp(peaks - row_max)).sum(-1, keepdim=True)
    return chunk_max, row_max, total.clamp_(min=1).log_()


@triton.jit
def _segment_kernel(
    rows, chunk_max, peaks, sums, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    inside = chunk < chunks
    offsets = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    values = tl.load(rows + row * chunks * CHUNK + offsets, inside[:, None], other=float("-inf"))
    values = values.to(tl.float32)
    maxima = tl.max(values, axis=1)
    peak = tl.max(maxima, axis=0)
    # An empty segment sums to 0 and not to NaN, which is left for poisoned ones.
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.sum(tl.exp(values - base), axis=1), axis=0)
    tl.store(chunk_max + row * chunks + chunk, maxima, inside)
    segment = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + segment, peak)
    tl.store(sums + segment, total)


def search_levels(costs: Tensor, table: Tensor, spans: Tensor, widest: int, places: int) -> Tensor:
    """Keys (cost, pair) of every place, all levels in one program per request.

    Args:
        costs: float32 [B, levels, k], contiguous, ascending along k.
        table: int64 [pairs, 3], contiguous: depth, 1 + index into levels * k, the parent's place.
        spans: int64 [levels, 4], contiguous: first pair, pairs, first place, places.
        widest: the largest number of pairs of a level.
        places: number of places, the root's included.
    Returns:
        int64 [B, places].
    """
    batch, levels, k = costs.shape
    keys = torch.zeros(batch, places, dtype=torch.int64, device=costs.device)
    _search_kernel[(batch,)](
        costs,
        table,
        spans,
        keys,
        levels,
        levels * k,
        places,
        LANES=max(16, triton.next_power_of_2(widest)),
        num_warps=8 if widest > 512 else 4,
    )
    return keys


@triton.jit
def _search_kernel(costs, table, spans, keys, levels, row_costs, row_keys, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    costs += row * row_costs
    keys += row * row_keys
    lane = tl.arange(0, LANES)
    for level in range(levels):
        first_pair = tl.load(spans + level * 4)
        first_place = tl.load(spans + level * 4 + 2)
        inside = lane < tl.load(spans + level * 4 + 1)
        pair = first_pair + lane
        token = tl.load(table + pair * 3 + 1, inside, other=1) - 1
        parent = tl.load(table + pair * 3 + 2, inside, other=0)
        parent_cost = (tl.load(keys + parent) >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        cost = parent_cost + tl.load(costs + token)
        key = (cost.to(tl.int32, bitcast=True).to(tl.int64) << 32) | pair
        key = tl.sort(tl.where(inside, key, 0x7FFFFFFFFFFFFFFF))
        tl.store(keys + first_place + lane, key, lane < tl.load(spans + level * 4 + 3))
        tl.debug_barrier()  # the next level reads these keys in other threads

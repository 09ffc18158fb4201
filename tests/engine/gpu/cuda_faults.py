"""The CUDA engine with one fault that only such an engine can have: of captured and padded buffers,
of the merge of splits, of blocks that add up together, of Hopper's own attention, of integer width.

`cuda_faults:make_engine` with the option `fault` is such an engine. A fault is a change of a
kernel's text, compiled like the honest one, or of what the launcher stages.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kdtr.engine import cuda_attention, cuda_cuts, cuda_hopper, cuda_modules, make_cuda_engine
from kdtr.engine.cuda_cuts import Cut
from kdtr.engine.cuda_launcher import CudaLauncher


@dataclass(frozen=True, slots=True)
class CudaFault:
    """What is changed, and the stages at which the gate may see it first.

    seen_at              none: a test of its own shows it
    file, before, after  a kernel's text; "" for a fault of the launcher
    fast                 of a kernel that bfloat16 and the sizes of cuda_models.NARROW take
    splits               of the tensor cores' attention at most, where it is judged
    three_stages         there where an SM has the memory for three stages of it, and not elsewhere
    """

    seen_at: frozenset[str]
    file: str = ""
    before: str = ""
    after: str = ""
    fast: bool = False
    splits: int = 4
    three_stages: bool = False

    def of_hopper(self) -> bool:
        """Whether it is planted in a kernel that Hopper alone has."""
        return self.file in cuda_modules.HOPPER_FILES


FAULTS: dict[str, CudaFault] = {
    # Captured and padded buffers
    "padding_keeps_its_rows": CudaFault(frozenset({"scores", "out_latent", "untouched"})),
    "padding_is_walkable": CudaFault(frozenset({"path", "answer", "bonus", "moves"})),
    "count_of_the_call_before": CudaFault(
        frozenset({"scores", "out_latent", "embedding", "hidden", "logits"})
    ),
    "length_of_the_call_before": CudaFault(frozenset({"scores", "out_latent"})),
    "mask_of_the_capture": CudaFault(frozenset({"mask"})),
    "position_of_the_capture": CudaFault(frozenset({"positions"})),
    "prefix_short_by_the_padding": CudaFault(
        frozenset({"scores"}),
        "verify_attn",
        "i64 column = slot - open_len;\n    return",
        "i64 column = slot - (open_len - 1);\n    return",
    ),
    # Merge of splits
    "weights_in_the_wrong_base": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn",
        "sum = fmaf(expf(top[i * n_rows + row] - largest),\n                       acc",
        "sum = fmaf(exp2f(top[i * n_rows + row] - largest),\n                       acc",
    ),
    "empty_split_is_infinite": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn",
        "top[out_row + tid] = largest[tid];",
        "top[out_row + tid] = largest[tid] == NEG_INF ? POS_INF : largest[tid];",
    ),
    "empty_split_is_not_written": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn",
        "if (tid < heads) {\n        top",
        "if (tid < heads && largest[tid] != NEG_INF) {\n        top",
    ),
    "last_split_is_lost": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn",
        "int splits = (int)((*n_slots + split_size - 1) / split_size);",
        "int splits = max(1, (int)(*n_slots / split_size));",
    ),
    "norm_of_the_last_split_alone": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn",
        "norm[i * n_rows + row], total);",
        "norm[i * n_rows + row], 0.f);",
    ),
    "merge_in_no_order": CudaFault(
        frozenset(),
        "verify_attn",
        "for (int i = 0; i < splits; ++i)\n            sum = fmaf(expf(top[i * n_rows + row]",
        "for (int j = 0, s = (int)(clock64() % splits), i; i = (j + s) % splits, j < splits; ++j)\n"
        "            sum = fmaf(expf(top[i * n_rows + row]",
    ),
    # The same in the tensor cores' attention
    "fast_weights_in_the_wrong_base": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn_mma",
        "weights[i] = exp2_fast(its.x - top);",
        "weights[i] = expf(its.x - top);",
        fast=True,
    ),
    "fast_last_split_is_lost": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn_mma",
        "int used = splits_in_use(cache_tiles, most);",
        "int used = max(1, splits_in_use(cache_tiles, most) - 1);",
        fast=True,
    ),
    "fast_unused_splits_are_merged": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn_mma",
        "int used = splits_in_use(cache_tiles, most);",
        "int used = most;",
        fast=True,
    ),
    "fast_columns_of_the_first_part_alone": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn_mma",
        "sum.x += y.x;",
        "",
        fast=True,
    ),
    "fast_light_rows_merge_all_splits": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn_mma",
        "if (row >= heavy_rows) used = light_splits(cache_tiles, used);",
        "",
        fast=True,
    ),
    "fast_light_blocks_skip_tiles": CudaFault(
        frozenset({"scores", "out_latent"}),
        "verify_attn_mma",
        "return LIGHT ? light_splits(tiles, splits) : splits;",
        "return splits;",
        fast=True,
    ),
    "fast_last_tile_shows_all_its_slots": CudaFault(
        frozenset({"scores"}),
        "verify_attn_mma",
        "seen_of_last = seen_by(row_of_lane, last);",
        "seen_of_last = ~0u;",
        fast=True,
    ),
    "fast_values_behind_the_last_slot": CudaFault(
        frozenset(),
        "verify_attn_mma",
        "min((int)(16 * step + (thread & 15)), n_slots - first - 1)",
        "(int)(16 * step + (thread & 15))",
        fast=True,
    ),
    "fast_third_stage_is_the_first": CudaFault(
        frozenset({"scores", "out_latent"}),
        "verify_attn_mma",
        "u32 tile = base + Layout::STAGES_AT + stage * TILE_BYTES;",
        "u32 tile = base + Layout::STAGES_AT + stage % 2 * TILE_BYTES;",
        fast=True,
        splits=1,  # five tiles
        three_stages=True,
    ),
    # The same on Hopper. With one split a block has three tiles, for two stages
    "hopper_rows_see_what_those_above_see": CudaFault(
        frozenset({"scores"}),
        "verify_attn_wgmma",
        "seen_of_last[r] = seen_by(row + 8 * r, last);",
        "seen_of_last[r] = row + 8 * r < n_rows ? seen_by(row, last) : 0;",
        fast=True,
    ),
    "hopper_upper_slots_are_masked_as_the_lower": CudaFault(
        frozenset({"scores"}),
        "verify_attn_wgmma",
        "(u64)seen[1] << 32 | seen[0]",
        "(u64)seen[0] << 32 | seen[0]",
        fast=True,
    ),
    "hopper_values_beyond_the_last_slot_stay": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn_wgmma",
        "n_slots - last < KEYS",
        "false",
        fast=True,
    ),
    "hopper_stale_stage": CudaFault(
        frozenset({"scores", "out_latent"}),
        "verify_attn_wgmma",
        "u32 tile = base + (k & 1) * TILE_BYTES;",
        "u32 tile = base + (k > 0) * TILE_BYTES;",
        fast=True,
        splits=1,
    ),
    "hopper_columns_one_group_to_the_left": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn_wgmma",
        "+ (k & 1) * TILE_BYTES + 4 * GROUP_BYTES;",
        "+ (k & 1) * TILE_BYTES + 3 * GROUP_BYTES;",
        fast=True,
    ),
    "hopper_splits_have_one_norm": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn_wgmma",
        "float* at = stats + ((i64)(row + 8 * r) * gridDim.y + split) * 2;",
        "float* at = stats + ((i64)(row + 8 * r) * gridDim.y) * 2;",
        fast=True,
    ),
    "hopper_partial_columns_of_the_left_group": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn_wgmma",
        "* LATENT + group * 256 + (lane & 3) * 4;",
        "* LATENT + (lane & 3) * 4;",
        fast=True,
    ),
    "hopper_norm_of_half_a_row": CudaFault(
        frozenset({"out_latent"}),
        "verify_attn_wgmma",
        "norm[1] += __shfl_xor_sync(~0u, norm[1], 2);",
        "",
        fast=True,
    ),
    # Blocks that add up together: a cluster's, and the last one of a launch
    "every_tile_of_rows_is_the_first": CudaFault(
        frozenset({"q_nope", "q_pe", "c_kv", "k_pe"}),
        "linear",
        "Block::place(0, its % BANDS) + its / BANDS * 32",
        "Block::place(0, its % BANDS)",
        fast=True,
    ),
    "every_block_adds_up_the_first_share": CudaFault(
        frozenset({"q_nope", "q_pe", "c_kv", "k_pe"}),
        "linear",
        "item = (threadIdx.x >> 5) * PARTS + part;",
        "item = (threadIdx.x >> 5) * PARTS;",
        fast=True,
    ),
    "blocks_do_not_wait_for_the_slowest": CudaFault(
        frozenset({"q_nope", "q_pe", "c_kv", "k_pe"}),
        "linear",
        "Block::put_both(acc);\n    cluster_barrier();",
        "for (i64 t = clock64(); part == 1 && clock64() - t < 200000;) {}\n"
        "    Block::put_both(acc);\n    __syncthreads();",
        fast=True,
    ),
    "hopper_every_block_adds_up_the_first_share": CudaFault(
        frozenset({"q_nope", "q_pe", "c_kv", "k_pe"}),
        "linear_wgmma",
        "if (8 * (t * SOURCES + source) < rows) put(t * SOURCES + source, total[t]);",
        "if (8 * (t * SOURCES) < rows) put(t * SOURCES, total[t]);",
        fast=True,
    ),
    "hopper_one_block_gives_for_all": CudaFault(
        frozenset({"q_nope", "q_pe", "c_kv", "k_pe"}),
        "linear_wgmma",
        "(place + at(t, other));",
        "(place + at(t, 1));",
        fast=True,
    ),
    "hopper_half_of_a_step_twice": CudaFault(
        frozenset({"q_nope", "q_pe", "c_kv", "k_pe"}),
        "linear_wgmma",
        "further(w, chunk + from + 2), further(x, chunk + from + 2)",
        "further(w, chunk + from), further(x, chunk + from)",
        fast=True,
    ),
    "counter_of_the_router_is_not_reset": CudaFault(
        frozenset({"mlp_out", "logits", "q_nope", "q_pe", "root", "targets"}),
        "router",
        "if (is_last) *arrived = 0;",
        "",
        fast=True,
    ),
    # Integer width
    "ancestors_in_one_word": CudaFault(
        frozenset({"mask"}),
        "tree",
        "seen[node >> 5] |= 1u << (node & 31);",
        "seen[(node & 63) >> 5] |= 1u << (node & 31);",
    ),
    "row_offset_of_32_bits": CudaFault(
        frozenset(),
        "latents",
        "real* cached = rows + physical * (c + r);",
        "real* cached = rows + (int)physical * (c + r);",
    ),
    "row_stride_of_32_bits": CudaFault(
        frozenset(),
        "rows",
        "const real* from = x + row * x_stride;",
        "const real* from = x + (int)((u32)row * (u32)x_stride);",
    ),
}


def make_engine(
    fault: str,
    dtype: str = "float32",
    splits: int | None = None,
    *,
    hopper: bool = False,
    **options: Any,
) -> Any:
    """Splits of 5 slots and pages of 3: every case has several of both.

    fault   "none" is the honest engine
    splits  of the tensor cores' attention at most, in the largest blocks that the rows half fill,
            instead of its own choice
    hopper  whether there are Hopper's own kernels; with `splits`, their blocks are the largest
    """
    if splits:
        assert callable(cuda_attention.choose_cut)
        cuda_attention.choose_cut = partial(_cut, splits)
    if not hopper:
        assert isinstance(cuda_modules.HOPPER_FILES, tuple)
        cuda_modules.HOPPER_FILES = ()
    with faulty_kernels(fault):
        engine = make_cuda_engine(**{"page_size": 3, "split_size": 5, "dtype": dtype, **options})
    if fault in _PLANTS:
        _PLANTS[fault](engine)
    return engine


def _cut(
    splits: int, n_rows: int, max_slots: int, page_size: int, device: Any, *, hopper: bool
) -> Cut:
    fits = hopper and cuda_cuts.wgmma_fits(n_rows, page_size)
    return Cut(cuda_hopper.ROWS if fits else 32 if n_rows > 16 else 16, splits)


def faulty_text(fault: str, kernels: Path) -> str:
    """The file of a fault of a kernel, changed."""
    planted = FAULTS[fault]
    text = (kernels / f"{planted.file}.cu").read_text()
    assert 1 == text.count(planted.before), f"{fault}: {planted.file}.cu has changed"
    return text.replace(planted.before, planted.after)


@contextmanager
def faulty_kernels(fault: str) -> Iterator[None]:
    """Engines that are made inside compile the changed text."""
    file = FAULTS[fault].file if fault in FAULTS else ""
    if not file:
        yield
        return
    honest = cuda_modules.KERNELS
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(shutil.copytree(honest, Path(folder) / "kernels"))
        (copied / f"{file}.cu").write_text(faulty_text(fault, honest))
        cuda_modules.KERNELS = copied
        try:
            yield
        finally:
            cuda_modules.KERNELS = honest


# What is staged: the header (count, committed_len, n_slots, max_emitted), then tokens, slots and
# parents of n rows each.


def _staging(
    engine: Any, change: Callable[[dict[Any, Any], np.ndarray, int, int], None], **own: Any
) -> None:
    """`change` is given what it remembers, the staged numbers, n and the rows that count.

    From the start it remembers the vocabulary's size.
    """
    launcher = engine.kernels.launcher

    def faulty(cache: Any, config: Any) -> CudaLauncher:
        made = launcher(cache, config)
        delivered, memory = made._delivered, {"vocab_size": config.vocab_size}

        def staged(host: np.ndarray, n: int, n_stops: int) -> Any:
            change(memory, host, n, int(host[0]))
            return delivered(host, n, n_stops)

        vars(made).update(own, _delivered=staged)
        return made

    engine.kernels.launcher = faulty


def _padding_keeps_its_rows(engine: Any) -> None:
    """Rows of padding keep the slots of the tree before: they are written there (GRAPH-1)."""

    def change(memory: dict[Any, Any], host: np.ndarray, n: int, count: int) -> None:
        slots = host[4 + n : 4 + 2 * n]
        before = memory.get(n)
        if before is not None:
            slots[count:] = before[count:]
        memory[n] = slots.copy()

    _staging(engine, change)


def _padding_is_walkable(engine: Any) -> None:
    """Nodes of padding are children of the root, with a token each (EDGE-3).

    The bucket is large and the tokens are around 88, the root's target in the third round of
    tiny's `star`, which no child of the root has there: a filler is accepted. Where a child has
    the target too, the two race.
    """

    def change(memory: dict[Any, Any], host: np.ndarray, n: int, count: int) -> None:
        host[4 + count : 4 + n] = (60 + np.arange(n - count)) % memory["vocab_size"]
        host[4 + 2 * n + count : 4 + 3 * n] = 0

    _staging(engine, change, row_bucket=lambda n: 129)


def _count_of_the_call_before(engine: Any) -> None:
    """The rows that count are those of the last call in the bucket (GRAPH-5)."""

    def change(memory: dict[Any, Any], host: np.ndarray, n: int, count: int) -> None:
        host[0] = memory.get(n, count)
        memory[n] = count

    _staging(engine, change)


def _length_of_the_call_before(engine: Any) -> None:
    """The attention reads as many slots as in the last call (GRAPH-7)."""

    def change(memory: dict[Any, Any], host: np.ndarray, n: int, count: int) -> None:
        host[2], memory["slots"] = memory.get("slots", host[2]), int(host[2])

    _staging(engine, change)


def _remembered(engine: Any, which: int) -> None:
    """One result of tree_layout is that of the first tree of the bucket (GRAPH-3)."""
    layout, first = engine.kernels.tree_layout, {}
    over = engine.kernels.over

    def tree_layout(parents: Any, committed_len: Any) -> Sequence[Any]:
        results = list(layout(parents, committed_len))
        kept = first.setdefault(len(parents), results[which].copy())
        results[which] = kept
        return results

    def faulty(rows: Any) -> Any:
        bound = over(rows)
        bound.tree_layout = tree_layout
        return bound

    engine.kernels.over = faulty


_PLANTS: dict[str, Callable[[Any], None]] = {
    "padding_keeps_its_rows": _padding_keeps_its_rows,
    "padding_is_walkable": _padding_is_walkable,
    "count_of_the_call_before": _count_of_the_call_before,
    "length_of_the_call_before": _length_of_the_call_before,
    "mask_of_the_capture": lambda engine: _remembered(engine, 1),
    "position_of_the_capture": lambda engine: _remembered(engine, 0),
}

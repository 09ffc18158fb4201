"""Faults for docs/examples/cpp-engine: each a line of its source, replaced in a copy of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CppFault:
    """What becomes of a line of `file`, the rule that this breaks, and where it is seen first."""

    file: str
    line: str
    becomes: str
    breaks: str
    first_seen_at: str


FAULTS = {
    "position_by_index": CppFault(  # L + i
        "tree.hpp",
        "positions[i] = positions[static_cast<std::size_t>(tree.parents[i])] + 1;",
        "positions[i] = positions[i - 1] + 1;",
        "POS-1",
        "positions",
    ),
    "siblings_seen": CppFault(  # causal over the nodes, as if the tree were a chain
        "tree.hpp",
        "for (const auto node : path_to(tree, static_cast<std::int64_t>(i)))",
        "for (std::size_t node = 0; node <= i; node++)",
        "MASK-2",
        "mask",
    ),
    "no_compaction": CppFault(  # rows stay where they are, and L grows
        "session.hpp",
        "from = length() + static_cast<std::size_t>(walk.path[k]);",
        "from = to;",
        "COMMIT-1",
        "cache_tokens",
    ),
    "root_from_path": CppFault(  # the last accepted draft, not the bonus
        "session.hpp",
        "root_ = walk.bonus;",
        "root_ = cache_.tokens[length() - 1];",
        "COMMIT-2",
        "root",
    ),
    "scale_from_latent": CppFault(
        "rotary.hpp",
        "1 / std::sqrt(static_cast<double>(c.qk_head_dim()));",
        "1 / std::sqrt(static_cast<double>(c.kv_lora_rank + c.qk_rope_head_dim));",
        "MLA-4",
        "scores",
    ),
    "scaled_twice": CppFault(
        "forward.hpp",
        "out[row][m] += weights[row][j] * expert[0][m];",
        "out[row][m] += weights[row][j] * static_cast<float>(c_.routed_scaling_factor) * "
        "expert[0][m];",
        "MOE-3",
        "mlp_out",
    ),
}

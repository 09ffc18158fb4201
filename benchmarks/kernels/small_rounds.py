"""A few small rounds on a GPU, for compute-sanitizer: every kernel runs, captured and launched.

    compute-sanitizer --tool memcheck python benchmarks/kernels/small_rounds.py float32
    compute-sanitizer --tool memcheck python benchmarks/kernels/small_rounds.py bfloat16 portable

`portable`: without the kernels that Hopper alone has.
Memory comes straight from the driver, a buffer per allocation: within a pool's arena a read past a
buffer's end would go unseen.
"""

from __future__ import annotations

import sys

import numpy as np

from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import DraftTree, ModelConfig
from kdtr.engine import cuda_modules, make_cuda_engine
from kdtr.engine.cuda_modules import import_cupy


def main(dtype: str, *, portable: bool) -> None:
    if portable:
        cuda_modules.HOPPER_FILES = ()
    import_cupy().cuda.set_allocator(None)
    tiny = ModelConfig.tiny()
    wide = tiny.replace(  # what the tensor cores' attention takes
        num_hidden_layers=2, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, num_attention_heads=8,
    )  # fmt: skip
    for config in (tiny, wide):
        for graphs in (False, True):
            engine = make_cuda_engine(dtype=dtype, graphs=graphs, page_size=64, split_size=32)
            session = engine.load((config, seed_tensors(config, 7))).open(max_len=200)
            session.prefill(list(range(1, 70)))
            for n in (1, 9, 9, 9, 40, 40):
                tree = DraftTree(
                    (session.root, *(i % 500 for i in range(1, n))),
                    (-1, *(i // 2 for i in range(n - 1))),
                )
                session.verify(tree)
                session.round(tree)
            session.build(np.random.default_rng(1).standard_normal((3, config.vocab_size)), 8)
            session.snapshot()
            how = "captured" if graphs else "launched"
            print(f"kv_lora_rank {config.kv_lora_rank} {how}: {session.committed_len} tokens")


if __name__ == "__main__":
    main(sys.argv[1], portable="portable" in sys.argv[2:])

"""What the table of rounds says where trees and decoding differ (benchmarks/kernels/rounds.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import DraftTree, ModelConfig
from kdtr.engine import make_engine

KERNELS = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"
N = 10  # tokens; the eighth is one of two with the same logit, in bfloat16


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(KERNELS)
    import rounds

    return rounds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_near_tie_is_told_from_a_wrong_token(rounds: Any, dtype: str) -> None:
    config = ModelConfig.tiny()
    model = make_engine(dtype=dtype).load((config, seed_tensors(config, 7)))
    session = model.open(max_len=100)
    plain, ranked, gaps = [session.prefill(rounds.PROMPT)], [], []
    for _ in range(N):
        logits = session.verify(DraftTree((session.root,), (-1,))).logits[0]
        ranked.append(np.argsort(-logits, kind="stable"))
        gaps.append(float(logits[ranked[-1][0]] - logits[ranked[-1][1]]))
        plain.append(session.decode())
    at = int(np.argmin(gaps)) + 1

    def said(token: int) -> tuple[str, float]:
        return rounds.agreement(model, dtype, plain, [*plain[:at], token, *plain[at + 1 :]])

    assert ("identical", 0.0) == said(plain[at])
    words, steps = said(int(ranked[at - 1][-1]))
    assert words.startswith(f"from token {at} on others: NO near tie, ")
    assert steps > rounds.MOST_STEPS[dtype]
    if dtype == "bfloat16":
        near = f"from token {at} on others: a near tie, 0 steps", 0.0
        assert (0.0, near) == (min(gaps), said(int(ranked[at - 1][1])))

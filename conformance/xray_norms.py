"""An x-ray model of the norms: logits that print the eps of each, and what the MLP computes.

Where the mean square of a norm's input is as small as its eps, the output tells the eps. Tokens
are of four kinds, by t % 4:

    LOUD    all is large: no eps matters
    QUIET   the latent's mean square is about rms_norm_eps, 2**-6, far above latent_norm_eps
    FAINT   the latent's mean square is about latent_norm_eps, 1e-6
    SOFT    the whole embedding's mean square is rms_norm_eps: the norms before attention, before
            the MLP and before the head each leave 1 / sqrt(2) of it

Lens 0 sees all rows alike and shows the latents' sizes. Lens 1 scores by the constant in k_pe, that
no norm but the input norm has touched, turned so slowly that distances do not matter. Lens 2 scores
marked tokens by q_nope alone. q_a makes a mean square of about 1e-6, so the scores of both tell
the eps of the q_a norm. One SwiGLU unit computes a number from the constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from typing import Any

import ml_dtypes
import numpy as np

from kdtr.conformance.finding import Finding, Verdict
from kdtr.conformance.xray_drive import Answer
from kdtr.conformance.xray_evidence import replayed
from kdtr.conformance.xray_fit import Precision
from kdtr.conformance.xray_judge import Judgement
from kdtr.conformance.xray_models import BASE, MIRROR, N_TOKENS, START
from kdtr.conformance.xray_places import place
from kdtr.conformance.xray_replay import RULES, SeenRow
from kdtr.conformance.xray_sessions import Script, Step
from kdtr.conformance.xray_words import row_name
from kdtr.contract import DraftTree, ModelConfig, tensor_shapes

LOUD, QUIET, FAINT, SOFT = range(4)
_LATENT = {LOUD: 1.0, QUIET: 2.0**-2, FAINT: 2.0**-9, SOFT: 1.0}  # kv_a
_RMS_EPS = 2.0**-6
_UNIT, _SOFT_UNIT = 8.0, 1.0
_Q_A = 2.0**-13
_RAW, _KEY = 16.0, 4.0
_GATE, _UP, _DOWN = 2.0**-2, 2.0**-3, 2.0**-5
_OUT, _DISPLAY, _ANCHOR = 2.0**-5, 2.0**9, 4.0
_SWIGLU = N_TOKENS + MIRROR  # the logit that shows it: in block 1 nobody else uses it


def _kind(token: int) -> int:
    return LOUD if token == START else token % 4


def _is_marked(token: int) -> bool:
    return _kind(token) in (LOUD, SOFT) and token // 4 % 2 == 1


@dataclass(frozen=True, slots=True)
class Norms:
    """The eps of every norm, and what else may be wrong there."""

    before_attention: float
    before_mlp: float
    last: float
    kv_a: float
    q_a: float
    last_twice: bool = False
    swapped: bool = False
    no_silu: bool = False


def rule_norms(config: ModelConfig) -> Norms:
    """NORM-1."""
    main, latent = config.rms_norm_eps, config.latent_norm_eps
    return Norms(main, main, main, latent, latent)


@dataclass(frozen=True, slots=True)
class NormsXray:
    """The generated model: one layer, three lenses, one SwiGLU unit."""

    name: str
    why: str
    config: ModelConfig

    def tensors(self) -> dict[str, np.ndarray]:
        """The checkpoint in bfloat16, which holds it exactly."""
        config, tokens = self.config, np.arange(N_TOKENS)
        tensors = {
            name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(config).items()
        }
        for name in tensors:
            if name.endswith("norm.weight"):
                tensors[name][:] = 2.0**-4 if "kv_a_layernorm" in name else 1
        swiglu = 4 * N_TOKENS
        constant = swiglu + 1
        unit = np.array([_SOFT_UNIT if _kind(t) == SOFT else _UNIT for t in range(N_TOKENS)])
        embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        n_constants = config.hidden_size // 64 - 1
        embedding[:, constant : constant + n_constants] = _UNIT
        embedding[:N_TOKENS, constant : constant + n_constants] = unit[:, None]
        embedding[tokens, tokens] = unit
        for block in range(3):
            head[block * N_TOKENS + tokens, (1 + block) * N_TOKENS + tokens] = _DISPLAY
        head[START] = head[MIRROR] = head[_SWIGLU] = 0
        head[MIRROR, N_TOKENS + START] = head[_SWIGLU, swiglu] = _DISPLAY
        head[START, constant] = _ANCHOR
        d, v, c = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
        attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
        kv_a = tensors[attention + "kv_a_proj_with_mqa.weight"]
        kv_a[tokens, tokens] = [_LATENT[_kind(t)] for t in range(N_TOKENS)]
        # The last pair turns by less than 2**-13 over a session; its first members meet.
        half = config.qk_rope_head_dim // 2
        slow = 2 * (half - 1) if config.rope_interleave else half - 1
        kv_a[c + slow, constant] = _KEY / _UNIT
        tensors[attention + "q_a_proj.weight"][:, constant] = _Q_A
        queries = tensors[attention + "q_b_proj.weight"].reshape(-1, config.qk_head_dim, 24)
        queries[1, d + slow, 0] = _RAW
        queries[2, 0, 0] = _RAW
        kv_b = tensors[attention + "kv_b_proj.weight"].reshape(-1, d + v, c)
        kv_b[2, 0, [t for t in range(N_TOKENS) if _is_marked(t)]] = 1
        o = tensors[attention + "o_proj.weight"].reshape(-1, config.num_attention_heads, v)
        for block in range(3):
            kv_b[block, d + tokens, tokens] = 1
            o[(1 + block) * N_TOKENS + tokens, block, tokens] = _OUT
        tensors[mlp + "gate_proj.weight"][0, constant] = _GATE
        tensors[mlp + "up_proj.weight"][0, constant] = _UP
        tensors[mlp + "down_proj.weight"][swiglu, 0] = _DOWN
        return {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}

    def scripts(self) -> list[Script]:
        """Rows and keys of every kind; the prompts end loud, so that START is their target."""
        steps = (
            Step(
                0, DraftTree((START, 8, 9, 10, 11, 15, 12), (-1, 0, 0, 0, 0, 4, 2)), (0, 2, 6), 16
            ),
            Step(1, DraftTree((16, 17, 19, 23, 28), (-1, 0, 0, 0, 3)), (0, 2), 20),
            Step(2, DraftTree((20,), (-1,)), (0,), 24),
        )
        return [Script("kinds", ((1, 2, 3, 7, 0), (5, 6, 4)), steps)]

    def shown(self, row: SeenRow, norms: Norms) -> np.ndarray:
        """The logits of a row, [4, N_TOKENS]: three lenses, then START and the SwiGLU."""
        config = self.config

        def unit(token: int) -> float:
            return _SOFT_UNIT if _kind(token) == SOFT else _UNIT

        def normed(token: int, eps: float) -> float:
            """A unit of the token's embedding, whose mean square is that of 1/64 of it squared."""
            return unit(token) / (unit(token) ** 2 / 64 + eps) ** 0.5

        own = row.own.token
        low = _Q_A * normed(own, norms.before_attention)
        low /= (low * low + norms.q_a) ** 0.5
        scale = config.qk_head_dim**-0.5
        scores = np.zeros((3, len(row.visible)))
        latents = np.zeros(len(row.visible))
        for i, cell in enumerate(row.visible):
            x = normed(cell.token, norms.before_attention)
            latent = x * _LATENT[_kind(cell.token)]
            latents[i] = latent / (latent * latent / config.kv_lora_rank + norms.kv_a) ** 0.5 / 16
            scores[1, i] = scale * _RAW * low * _KEY * x / _UNIT
            scores[2, i] = scale * _RAW * low * latents[i] * _is_marked(cell.token)
        e = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares = e / e.sum(axis=1, keepdims=True)
        x = normed(own, norms.before_mlp)
        gate, up = _GATE * x, _UP * x
        if norms.swapped:
            gate, up = up, gate
        inner = gate * up if norms.no_silu else gate / (1 + exp(-gate)) * up
        rms = (unit(own) ** 2 / 64 + norms.last) ** 0.5
        if norms.last_twice:
            rms *= (unit(own) ** 2 / 64 / rms**2 + norms.last) ** 0.5
        out = np.zeros((4, N_TOKENS))
        for i, cell in enumerate(row.visible):
            out[:3, cell.token] += _OUT * _DISPLAY / rms * latents[i] * shares[:, i]
        out[3, :2] = _ANCHOR * unit(own) / rms, _DOWN * inner * _DISPLAY / rms
        return out


def norms_model() -> NormsXray:
    fields: dict[str, Any] = {
        **BASE,
        "vocab_size": 3 * N_TOKENS,
        "hidden_size": 640,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "first_k_dense_replace": 1,
        "rms_norm_eps": _RMS_EPS,
        "rope_theta": 1e8,
    }
    return NormsXray("norms", "the eps of every norm, and the SwiGLU", ModelConfig(**fields))


def read_norms(logits: np.ndarray) -> np.ndarray:
    """What `shown` predicts, from a row's logits."""
    row = np.asarray(logits, dtype=np.float64)
    out = np.zeros((4, N_TOKENS))
    out[:3] = row.reshape(3, N_TOKENS)
    out[0, START] = row[MIRROR]
    out[0, MIRROR] = out[1, MIRROR] = 0
    out[3, :2] = row[START], row[_SWIGLU]
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Fault:
    says: str
    stage: str
    rules: tuple[str, ...]
    changes: dict[str, Any]


def _faults(config: ModelConfig) -> Iterator[_Fault]:
    main, latent = config.rms_norm_eps, config.latent_norm_eps
    named = {
        "kv_a": ("the kv_a norm", "c_kv", latent, "latent_norm_eps"),
        "q_a": ("the q_a norm", "q_nope", latent, "latent_norm_eps"),
        "before_attention": ("the input norm", "q_nope", main, "rms_norm_eps"),
        "before_mlp": ("the post-attention norm", "mlp_out", main, "rms_norm_eps"),
        "last": ("the final norm", "final_hidden", main, "rms_norm_eps"),
    }
    groups: list[tuple[str, ...]] = [(name,) for name in named]
    groups += [("kv_a", "q_a"), ("before_attention", "before_mlp", "last"), tuple(named)]
    for eps in (main, latent, 1e-5, 1e-6, 1e-8, 0.0):
        for group in groups:
            if any(named[one][2] == eps for one in group):
                continue
            what = ", ".join(named[one][0] for one in group)
            right = " and ".join(
                dict.fromkeys(f"{named[one][3]} = {named[one][2]:g}" for one in group)
            )
            name = {main: "rms_norm_eps = ", latent: "latent_norm_eps = "}.get(eps, "")
            yield _Fault(
                f"{what} use{'' if len(group) > 1 else 's'} {name}{eps:g}, should be {right}",
                named[group[0]][1],
                ("NORM-1",),
                dict.fromkeys(group, eps),
            )
    yield _Fault(
        "the final norm is applied twice", "final_hidden", ("NORM-1",), {"last_twice": True}
    )
    yield _Fault(
        "gate and up are exchanged: the MLP is gate silu(up), should be up silu(gate)",
        "mlp_out",
        ("MOE-4",),
        {"swapped": True},
    )
    yield _Fault("the MLP has no silu", "mlp_out", ("MOE-4",), {"no_silu": True})


def judge_norms(model: NormsXray, answers: Sequence[Answer], precision: Precision) -> Judgement:
    """The rules, then every known fault, then the logit that is farthest off.

    A logit is stored ten times on its way, and in the lenses that score, up to S = 10, the weights
    move by 3 u S, as in xray_fit.py. The outputs of lenses and MLP raise the mean square of a soft
    row, 2**-6, by less than 2**-11 of it.
    """
    rows = [*replayed(answers, RULES)]
    seen = np.array([read_norms(row) for answer in answers for row in answer.logits])
    bound = precision.u * np.array([10, 40, 40, 10]) + 2.0**-11
    places = [(answer, row) for answer in answers for row in range(len(answer.step.tree))]

    def errors(norms: Norms) -> Iterator[float]:
        for row, shown in zip(rows, seen, strict=True):
            yield _misfit(shown, model.shown(row, norms), bound)

    right = rule_norms(model.config)
    of_rules = np.array([*errors(right)])
    headroom = float(of_rules[np.isfinite(of_rules)].max(initial=0.0))
    result = Judgement([], [], len(rows), seen.size, headroom)
    if not (of_rules > 1).any():
        return result
    # An eps and a norm applied twice may be close: the best of those that fit.
    worst = {fault: max(errors(replace(right, **fault.changes))) for fault in _faults(model.config)}
    best = min(worst.values())
    found = next(fault for fault in worst if worst[fault] <= best + 0.1)
    known = worst[found] <= 1
    first = int(np.argmax(of_rules > 1))
    answer, row = places[first]
    wanted = model.shown(rows[first], right)
    both = (wanted > 0) & (seen[first] > 0)
    ratio = np.where(both, seen[first] / np.where(both, wanted, 1), 1)
    block, token = np.unravel_index(np.argmax(abs(np.log(ratio))), ratio.shape)
    result.known.append(known)
    if not known:
        says = f"norms, MLP or head leave {ratio[block, token]:.4g} times what they should"
        found = _Fault(says, "logits", ("NORM-1", "MOE-4"), {})
    result.findings.append(
        Finding(
            Verdict.FAIL,
            place(model.name, answer),
            found.stage,
            found.says,
            row_name(row, answer.step.tree.parents),
            f"logit {wanted[block, token]:.5g}",
            f"{seen[first][block, token]:.5g}",
            found.rules,
        )
    )
    return result


def _misfit(seen: np.ndarray, wanted: np.ndarray, bound: np.ndarray) -> float:
    if not np.isfinite(seen).all() or ((seen != 0) != (wanted != 0)).any() or (seen < 0).any():
        return inf
    ratio = np.where(wanted > 0, seen, 1) / np.where(wanted > 0, wanted, 1)
    return float((abs(np.log(ratio)) / bound[:, None]).max())

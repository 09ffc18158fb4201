"""Why a finding looks as it does: guesses at the cause, held against what was shown.

Two kinds of recognisers. Patterns look at the stage itself: these positions are L + index, these
scores are all times 0.77. Twists do the point's forward again, in one way wrong, and compare what
that would show; so an engine that shows nothing but logits is told which fault gives such logits.
The truth and the engine are not asked anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kdtr.conformance import (
    diagnosis_attention,
    diagnosis_cache,
    diagnosis_commit,
    diagnosis_layout,
    diagnosis_rows,
)
from kdtr.conformance.diagnosis_attention import attention_twists
from kdtr.conformance.diagnosis_experts import expert_twists
from kdtr.conformance.diagnosis_forward import Setting, append, forward
from kdtr.conformance.diagnosis_merges import merge_twists
from kdtr.conformance.diagnosis_pages import page_twists
from kdtr.conformance.diagnosis_past import Past, wrong_commits
from kdtr.conformance.diagnosis_projections import projection_twists
from kdtr.conformance.diagnosis_scene import BY_CHANCE, FITS, Guess, Hint, Key, Ranked, Scene, weigh
from kdtr.conformance.diagnosis_snapshot import informed, snapshot_twists
from kdtr.conformance.diagnosis_twist import Twist
from kdtr.contract import Source, stage_order

MOST = 3  # hints of one finding
_NOTHING = 1e-6  # of the squared error: what float32 leaves of a cause that is the right one
_TOO_MANY = 0.5  # the fit of a hint that says no more than that


def diagnose(scene: Scene) -> tuple[Hint, ...]:
    """At most three hints, the best first; none where nothing is recognised."""
    past = Past(scene)
    found = [one for one in _all(scene, past) if one is not None]
    found.sort(key=Ranked.key)
    if (
        _is_decision(scene)
        and len({one.hint.says for one in found[:2] if _ties(found[0], one)}) > 1
    ):
        # One token has two explanations: neither is certain.
        found = [
            replace(one, hint=replace(one.hint, fit=min(one.hint.fit, BY_CHANCE))) for one in found
        ]
    if found and found[0].hint.fit >= 1 and found[0].specific >= 2:
        # A cause that explains everything: where it lies is no news.
        found = [one for one in found if one.specific >= 2]
    hints: list[Hint] = []
    for one in found:
        if one.hint.says not in (hint.says for hint in hints):
            hints.append(one.hint)
    return tuple(informed(hint, scene, past) for hint in hints[:MOST])


def _ties(first: Ranked, other: Ranked) -> bool:
    return first.key()[:2] == other.key()[:2]


def _all(scene: Scene, past: Past) -> Iterator[Ranked | None]:
    yield from diagnosis_layout.hints(scene)
    yield from diagnosis_attention.hints(scene, past)
    yield from diagnosis_commit.hints(scene)
    yield from diagnosis_cache.hints(scene, past)
    yield from diagnosis_rows.hints(scene)
    if scene.stage.source in (Source.BUILD, Source.JUDGE) or scene.stage.name in _GIVEN:
        return
    if _is_decision(scene) and scene.logits_were_right:
        return
    if scene.stage.source is Source.COMMIT and past.shown_rows() is not None:
        return  # the forward was shown and right: it is the commit
    if not past.is_small or not (scene.same_form or _is_decision(scene)):
        return
    fitting = _fitting(scene, past)
    if _is_decision(scene) and len(fitting) > MOST:
        says = (
            f"{len(fitting)} of the wrong forwards that are known here would decide so: it is too "
            "little to tell them apart"
        )
        yield Ranked(Hint(says, fit=_TOO_MANY, seen_in="logits"), 1)
    else:
        yield from fitting


def _fitting(scene: Scene, past: Past) -> list[Ranked]:
    """The wrong forwards that show what was shown; none is tried after one that leaves nothing.

    Of numbers: that another explains as well as many of them by chance is out of the question.
    """
    numeric = scene.same_form and not scene.stage.exact
    told = numeric and bool((scene.differs & np.isfinite(scene.actual.astype(np.float64))).any())
    fitting = []
    for twist in _twists(scene, past):
        one = _tried(scene, past, twist)
        if one is None:
            continue
        fitting.append(one)
        if told and one.hint.fit >= 1 and one.specific >= 3 and one.residual <= _NOTHING:
            break
    return fitting


def _twists(scene: Scene, past: Past) -> Iterator[Twist]:
    yield from _layout_twists(scene, past)
    yield from projection_twists(past)
    yield from attention_twists(past)
    yield from page_twists(past)
    yield from merge_twists(past)
    yield from expert_twists(past)
    yield from _cache_twists(scene, past)
    yield from _prefill_twists(scene, past)


def _is_decision(scene: Scene) -> bool:
    return scene.stage.source is Source.WALK or scene.stage.name == "root"


# What a forward is told, or what cannot depend on its numbers.
_GIVEN = frozenset(
    {
        *("parents", "tokens", "positions", "mask", "slots"),
        *("committed_len", "moves", "cache_tokens", "cache_positions"),
    }
)


def _layout_twists(scene: Scene, past: Past) -> Iterator[Twist]:
    """The guesses of diagnosis_layout.py, as what a forward computes with."""
    right = past.setting
    shown = {name for name, _ in scene.seen}
    rotated = "rotation is as if " if "positions" in shown else ""
    masked = "attention is as if " if "mask" in shown else ""
    for guess in diagnosis_layout.positions_guesses(scene):
        other = replace(right, positions=guess.predicted)
        yield Twist(rotated + guess.says, guess.rules, "positions", other, guess.specific)
    for guess in diagnosis_layout.mask_guesses(scene):
        other = replace(right, mask=guess.predicted)
        yield Twist(masked + guess.says, guess.rules, "mask", other, guess.specific)


def _cache_twists(scene: Scene, past: Past) -> Iterator[Twist]:
    """What commits before this point may have left."""
    if not scene.history or scene.cache_was_right:
        return
    if scene.cache_was_shown:
        yield from snapshot_twists(scene, past)
        return
    for wrong in wrong_commits():
        always = past.wrongly_kept(wrong.keep)
        rounds = past.wrongly_kept(wrong.keep, chunks=False)
        says = f"the cache, as commits before this point left it: {wrong.says}"
        yield Twist(says, wrong.rules, "cache_c_kv", always, wrong.specific)
        if not np.array_equal(always.rows, rounds.rows, equal_nan=True):
            says = f"the cache, as rounds before this point left it: {wrong.says}"
            yield Twist(says, wrong.rules, "cache_c_kv", rounds, wrong.specific)
    for says, how in diagnosis_attention.wrong_writes(past):
        yield Twist(f"before this point, {says}", ("SLOT-1",), "scores", past.before(how))


def _prefill_twists(scene: Scene, past: Past) -> Iterator[Twist]:
    """Positions and masks of the prompt's chunks, of which an engine may have shown the root."""
    if scene.cache_was_right:
        return
    told: dict[tuple[str, str], dict[int, Guess]] = {}
    right: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for number, expectation in enumerate(scene.history):
        if expectation.get("parents") is not None:
            continue
        chunk = replace(scene, expectation=expectation, history=scene.history[:number])
        right[number] = chunk.truth("positions"), chunk.truth("mask")
        for field, guesses in (
            ("positions", diagnosis_layout.positions_guesses(chunk)),
            ("mask", diagnosis_layout.mask_guesses(chunk)),
        ):
            for guess in guesses:
                if not np.array_equal(guess.predicted, chunk.truth(field)):
                    told.setdefault((field, guess.says), {})[number] = guess
    for (field, says), chunks in told.items():
        others = {}
        for number, guess in chunks.items():
            positions, mask = right[number]
            is_mask = field == "mask"
            others[number] = (positions, guess.predicted) if is_mask else (guess.predicted, mask)
        verb = "attention was as if " if field == "mask" else ""
        text = f"in the prefill before this point {verb}{says}"
        first = next(iter(chunks.values()))
        yield Twist(text, first.rules, "cache_c_kv", past.after_others(others), first.specific)


def _tried(scene: Scene, past: Past, twist: Twist) -> Ranked | None:
    """The twist as a hint, if a forward that goes so wrong shows what was shown."""
    if _is_ruled_out(scene, twist):
        return None
    key: Key = (scene.stage.name, scene.layer)
    setting = twist.setting
    how = setting.workings
    with np.errstate(all="ignore"):
        if _fails_early(scene, past, setting, key):
            return None
        is_past_right = not scene.history or scene.cache_was_right
        if not is_past_right and how is not past.right and not how.also_reads:
            setting = past.ever(how)
        shown = forward(past.weight, setting, until=key)
    if key not in shown:
        shown |= _decided(scene, past, shown)
    if key not in shown:
        return None
    seen = scene.seen_before if twist.seen_in.startswith("cache_") else scene.seen
    was_shown = any(name == twist.seen_in for name, _ in seen)
    return weigh(
        scene,
        Guess(twist.says, twist.rules, shown[key], twist.specific),
        most=BY_CHANCE if _is_decision(scene) else 1.0,
        seen_in="" if was_shown or twist.seen_in == scene.stage.name else twist.seen_in,
    )


def _fails_early(scene: Scene, past: Past, setting: Setting, key: Key) -> bool:
    """Whether the first row that differs is not as guessed: most guesses need no more to fall.

    In the layers that a row shares with none behind it; so not for other masks or written rows.
    """
    how, right, n = setting.workings, past.setting, scene.n
    is_past_right = not scene.history or scene.cache_was_right
    is_causal = setting.mask is right.mask and how.append is append and setting.rows is right.rows
    if not (is_past_right and is_causal and scene.stage.axes.startswith("n") and scene.same_form):
        return False
    wrong = scene.differs.reshape(n, -1).any(axis=1)
    rows = int(np.flatnonzero(wrong)[0]) + 1
    if rows == n:
        return False
    columns = scene.committed_len + rows
    mask = setting.mask[:rows, :columns]
    few = replace(
        setting, tokens=setting.tokens[:rows], positions=setting.positions[:rows], mask=mask
    )
    shown = forward(past.weight, few, until=key)
    if key not in shown:
        return False
    full = scene.expected.copy()
    row = shown[key][-1]
    full[rows - 1][tuple(slice(size) for size in row.shape)] = row
    return bool(scene.close(full)[rows - 1].mean() < FITS)


def _is_ruled_out(scene: Scene, twist: Twist) -> bool:
    """Whether the stage that shows the twist first comes later, or was shown and right."""
    if twist.seen_in == "cache_c_kv":  # at the point before
        return False
    seen_in = "q_pe" if twist.seen_in == "positions" else twist.seen_in
    for stage, layer in stage_order(scene.config.num_hidden_layers):
        at = stage.name == seen_in and layer in (None, twist.first_layer)
        if stage.name == scene.stage.name and layer == scene.layer:
            return not at
        if at:
            if seen_in == "mask" or not twist.sure:
                return False
            was_judged = scene.expectation.get(seen_in, layer) is not None
            return was_judged and (seen_in, layer) in scene.seen
    return False


def _decided(scene: Scene, past: Past, shown: dict[Key, np.ndarray]) -> dict[Key, np.ndarray]:
    """What follows from a forward's logits and rows: decisions, and the rows kept."""
    logits = shown["logits", None]
    targets = logits.argmax(axis=1)
    found: dict[Key, np.ndarray] = {("targets", None): targets}
    if scene.is_chunk:
        found["root", None] = np.asarray(targets[-1])
    elif not (scene.limit.stop_tokens or scene.limit.max_emitted is not None):
        path = diagnosis_commit.walk(scene, targets)
        bonus = np.asarray(targets[path[-1]])
        found["path", None], found["bonus", None] = np.array(path), bonus
        found["root", None] = bonus
        tokens = scene.truth("tokens")
        found["emitted", None] = np.append(tokens[path[1:]], bonus)
    if scene.stage.source is Source.COMMIT and scene.expected.ndim == 3:
        layers = range(scene.config.num_hidden_layers)
        commit = past.commit(np.stack([shown["held", layer] for layer in layers]))
        source, destination = commit.moves()
        rows = commit.rows.copy()
        rows[:, destination] = commit.rows[:, source]
        rows, c = rows[:, : scene.expected.shape[1]], scene.config.kv_lora_rank
        found["cache_c_kv", None], found["cache_k_pe", None] = rows[..., :c], rows[..., c:]
    return found

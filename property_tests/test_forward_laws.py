"""The forward: a row of a tree is a plain run over its path, whatever else is in the tree."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from kdtr.contract import Acceptance, DraftTree
from kdtr.property_tests.fewer_verbs import (
    answers,
    place,
    place_again,
    plain_answer,
    rooted,
)
from kdtr.property_tests.judge import Judge, tree_scene
from kdtr.property_tests.strategies import (
    Scene,
    SmallModel,
    chunkings,
    draft_trees,
    nodes_of,
    prompts,
    scenes,
    small_models,
    tokens,
    topological_orders,
)
from kdtr.property_tests.subject import Answer, Subject, causal_rows
from kdtr.property_tests.trees import (
    chain,
    children,
    path_to,
    path_tokens,
    picture,
    pruned,
    reordered,
    siblings_reversed,
    under_root,
)


@given(scene=scenes())
def test_a_row_is_the_plain_run_over_its_path(engine: Subject, scene: Scene) -> None:
    """FWD-4, POS-1, MASK-1, MASK-2: row i of a verify equals the last row of a plain causal run,
    from an empty cache, over the committed tokens and path(i)."""
    placed = place(engine, scene.model, scene.prompt, scene.tree)
    tree = placed.tree

    rows = answers(placed.session, tree)

    for i in range(len(tree)):
        judge = Judge(engine, scene.model, tree_scene(tree, i))
        plain = plain_answer(engine, scene.model, placed.prompt, path_tokens(tree, i))
        what = f"row {i} (path {path_to(tree, i)})"
        judge.answer(what, plain, rows[i], history=placed.history(i))


@given(data=st.data(), model=small_models())
def test_a_chain_is_causal_verification(
    engine: Subject, data: st.DataObject, model: SmallModel
) -> None:
    """FWD-5, FWD-1: a chain tree gives the rows of the causal forward over the same tokens, and
    the target of its last row is the root that prefill of these tokens chooses."""
    vocab_size = model.config.vocab_size
    prompt = data.draw(prompts(vocab_size), label="prompt")
    drafted = data.draw(prompts(vocab_size, min_size=1), label="chain")
    placed = place(engine, model, prompt, chain(drafted))
    causal: list[np.ndarray | None] = [None] * len(drafted)
    if engine.offers("forward_tokens"):
        by_hand = engine.committed(model, placed.prompt)
        causal = list(causal_rows(by_hand, placed.tree.tokens))

    rows = answers(placed.session, placed.tree)
    root = engine.committed(model, placed.prompt).prefill(placed.tree.tokens)

    judge = Judge(engine, model)
    for i, row in enumerate(causal):
        if row is not None:
            plain = Answer(row, int(row.argmax()))
            judge.answer(f"row {i} of the chain", plain, rows[i], history=placed.history(i))
    judge.target("root", rows[-1].target, root, history=placed.history(len(rows) - 1))


@given(data=st.data(), model=small_models())
def test_every_chunking_of_a_prompt_is_the_same_prefill(
    engine: Subject, data: st.DataObject, model: SmallModel
) -> None:
    """FWD-1, FWD-6, LOSSLESS: prefill in chunks of any size gives the cache, the root and the
    later rows of prefill in one piece, and L grows by each chunk."""
    vocab_size = model.config.vocab_size
    prompt = data.draw(prompts(vocab_size, min_size=1, max_size=9), label="prompt")
    chunks = data.draw(chunkings(prompt), label="chunks")
    tree = data.draw(draft_trees(vocab_size, max_nodes=4), label="tree")
    whole, pieces = engine.open(model), engine.open(model)
    root = whole.prefill(prompt)

    lengths, roots = [0], []
    for chunk in chunks:
        roots.append(pieces.prefill(chunk))
        lengths.append(pieces.committed_len)

    judge = Judge(engine, model)
    judge.same("growth of L", [len(c) for c in chunks], [b - a for a, b in pairwise(lengths)])
    judge.same("root of the session", roots[-1], pieces.root)
    judge.target("root", root, roots[-1], history=prompt)
    if engine.offers("snapshot"):
        judge.cache("cache in chunks", whole.snapshot(), pieces.snapshot())
    tree = rooted(whole, tree)
    expected, actual = answers(whole, tree), answers(pieces, rooted(pieces, tree))
    for i in range(len(tree)):
        history = [*prompt, *path_tokens(tree, i)]
        what = f"row {i} behind the chunks"
        judge.answer(what, expected[i], actual[i], history=history)


@given(data=st.data(), model=small_models())
def test_decode_is_a_round_with_budget_0(
    engine: Subject, data: st.DataObject, model: SmallModel
) -> None:
    """FWD-2, TREE-3: decode, a round of the root alone and build with budget 0 followed by the
    steps of a round give the same token, root and cache; L grows by one."""
    vocab_size = model.config.vocab_size
    prompt = data.draw(prompts(vocab_size), label="prompt")
    root = data.draw(tokens(vocab_size), label="root")
    decoding, fused, stepwise = (engine.committed(model, prompt) for _ in range(3))
    for session in (decoding, fused, stepwise):
        session.set_root(root)

    token = decoding.decode()
    outcome = fused.round(DraftTree((root,), (-1,)))
    tree = stepwise.build(np.zeros((2, vocab_size)), 0)
    answer = stepwise.verify(tree)
    acceptance = stepwise.accept(tree)
    stepwise.commit(acceptance)

    judge = Judge(engine, model)
    judge.same("budget 0", DraftTree((root,), (-1,)), tree)
    told = (token, outcome.acceptance.bonus, answer.targets[0])
    judge.same("emitted", (told[1],), outcome.emitted)
    for session, bonus in zip((decoding, fused, stepwise), told, strict=True):
        judge.target("token", token, bonus, history=[*prompt, root])
        judge.same("L", len(prompt) + 1, session.committed_len)
        judge.same("root", bonus, session.root)
        judge.cache("cache", decoding.snapshot(), session.snapshot())
    for path in (outcome.acceptance, acceptance):
        judge.same("acceptance", Acceptance((0,), token), path)


def hold_rows(engine: Subject, scene: Scene, order: tuple[int, ...], what: str) -> None:
    """Row k of the tree made of the nodes `order` equals row order[k] of the whole tree."""
    model = scene.model
    placed = place(engine, model, scene.prompt, scene.tree)
    tree, other = placed.tree, reordered(placed.tree, order)
    rows = answers(placed.session, tree)

    changed = answers(place_again(engine, model, placed), other)

    for k, node in enumerate(order):
        shown = f"{picture(tree, [node])}\n{what}:\n{picture(other, [k])}"
        judge = Judge(engine, model, partial(str, shown))
        history = placed.history(node)
        judge.answer(f"row {node}, {what} row {k}", rows[node], changed[k], history=history)


@given(scene=scenes(), data=st.data())
def test_pruning_a_branch_changes_no_other_row(
    engine: Subject, scene: Scene, data: st.DataObject
) -> None:
    """MASK-2, FWD-4: taking a branch away, or adding it, changes no row outside of it."""
    assume(len(scene.tree) > 1)
    cut = data.draw(nodes_of(scene.tree, first=1), label="cut")

    hold_rows(engine, scene, pruned(scene.tree, cut), "pruned")


@given(scene=scenes(), data=st.data())
def test_another_topological_order_permutes_the_rows(
    engine: Subject, scene: Scene, data: st.DataObject
) -> None:
    """TREE-1, MASK-2: the same tree in another topological order gives the same rows in it."""
    order = data.draw(topological_orders(scene.tree), label="order")

    hold_rows(engine, scene, order, "reordered")


@given(scene=scenes())
def test_the_order_of_siblings_does_not_matter(engine: Subject, scene: Scene) -> None:
    """TREE-1, MASK-2: siblings last to first, depth first, give the same rows in that order."""
    hold_rows(engine, scene, siblings_reversed(scene.tree), "with siblings reversed")


@given(scene=scenes(max_nodes=6), data=st.data())
def test_a_verify_that_was_not_committed_is_never_seen(
    engine: Subject, scene: Scene, data: st.DataObject
) -> None:
    """COMMIT-4, MASK-3: rows of an abandoned verify, longer or shorter, change no later row."""
    model = scene.model
    abandoned = data.draw(draft_trees(model.config.vocab_size), label="abandoned")
    placed = place(engine, model, scene.prompt, scene.tree)
    tree, used = placed.tree, place_again(engine, model, placed)
    rows = answers(placed.session, tree)

    used.verify(rooted(used, abandoned))
    again = answers(used, rooted(used, tree))

    for i in range(len(tree)):
        judge = Judge(engine, model, tree_scene(tree, i))
        what = f"row {i} after an abandoned verify"
        judge.answer(what, rows[i], again[i], history=placed.history(i))


@given(data=st.data(), model=small_models())
def test_a_commit_then_a_verify_is_a_longer_prompt(
    engine: Subject, data: st.DataObject, model: SmallModel
) -> None:
    """COMMIT-3, COMMIT-4, FWD-4, FWD-1: after two rounds, of which the first leaves a node behind,
    the rows of the next tree are those behind one prefill of all that was committed."""
    vocab_size = model.config.vocab_size
    prompt = data.draw(prompts(vocab_size), label="prompt")
    drafted = [data.draw(draft_trees(vocab_size, max_nodes=n), label="tree") for n in (5, 4, 4)]
    lasts = [data.draw(nodes_of(tree), label="last accepted node") for tree in drafted[:2]]
    placed = place(engine, model, prompt, with_a_reject(drafted[0], lasts[0], vocab_size))
    session, first = placed.session, placed.tree
    second, third = drafted[1:]
    paths = path_tokens(first, lasts[0]), path_tokens(second, lasts[1])
    longer = engine.committed(model, [*placed.prompt, *paths[0], *paths[1]])

    session.verify(first)
    session.commit(Acceptance(path_to(first, lasts[0]), second.tokens[0]))
    session.verify(second)
    assert longer.root is not None
    session.commit(Acceptance(path_to(second, lasts[1]), longer.root))

    third = under_root(third, longer.root)
    expected, actual = answers(longer, third), answers(session, third)
    for i in range(len(third)):
        history = [*placed.prompt, *paths[0], *paths[1], *path_tokens(third, i)]
        judge = Judge(engine, model, tree_scene(third, i))
        judge.answer(f"row {i} after two rounds", expected[i], actual[i], history=history)


def with_a_reject(tree: DraftTree, last: int, vocab_size: int) -> DraftTree:
    """The tree; where the path to `last` is all of it, with one child of the root more."""
    if len(path_to(tree, last)) < len(tree):
        return tree
    below = {tree.tokens[i] for i in children(tree, 0)}
    free = next(token for token in range(vocab_size) if token not in below)
    return DraftTree((*tree.tokens, free), (*tree.parents, 0))

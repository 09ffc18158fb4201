"""Answers a file of questions (docs/offline.md), with nothing of the judge but its file format.

    kdtr questions GOLDEN.kdtr --out questions.kdtr
    python answer_questions.py questions.kdtr answers.kdtr
    kdtr judge answers.kdtr --against GOLDEN.kdtr

`answer` takes any engine with the verbs of contract/interface.py; yours goes where `host` stands.
"""

import sys

import numpy as np

from kdtr.contract import SILENT, DraftTree, EmitLimit
from kdtr.kdtr_format import Bundle, write_bundle


def answer(questions, answers, engine):
    with Bundle.open(questions) as bundle:
        asked = {name: np.array(bundle[name]) for name in bundle.view("input/").names()}
        found = {"questions/id": np.array(bundle["questions/id"])}
    model = engine.load(questions)
    for name in [name for name in asked if name.endswith("/max_len")]:
        case = name.split("/")[1]
        session = model.open(max_len=int(asked[name]))
        play(session, engine.info, f"input/{case}/", asked, f"answer/{case}/", found)
        session.close()
    model.close()
    info = engine.info
    write_bundle(answers, found, {"kind": "answers", "engine": told(info)})


def play(session, info, at, asked, out, found):
    """One case: prefill the prompt, then build and play round after round."""
    if at + "root" in asked:
        session.set_root(int(asked[at + "root"]))
    points = {name[len(at) :].split("/")[0] for name in asked if name.startswith(at)}
    for point in sorted(points - {"max_len", "root"}, key=lambda name: (name[0], len(name), name)):

        def put(stage, layer, array, prefix=f"{out}{point}/"):
            found[prefix + (stage if layer is None else f"layer{layer}/{stage}")] = np.array(array)

        def of(name, prefix=f"{at}{point}/"):
            return asked.get(prefix + name)

        try:
            trace = put if info.stages else SILENT
            if point.startswith("chunk"):
                session.prefill(of("tokens").tolist(), trace=trace)
            else:
                round_(session, info, of, put, trace)
        except Exception as error:  # the case ends here; why, is for people
            text = f"{type(error).__name__}: {error}"
            put("error", None, np.frombuffer(text.encode(), np.uint8))
            return
        put("committed_len", None, session.committed_len)
        put("root", None, session.root)
        if "snapshot" in info.verbs:
            cache = session.snapshot()
            for name in ("tokens", "positions", "c_kv", "k_pe"):
                put(f"cache_{name}", None, getattr(cache, name))


def round_(session, info, of, put, trace):
    if of("draft_logits") is not None and "build" in info.verbs:
        tree = session.build(of("draft_logits"), int(of("budget")))
        put("build_tokens", None, tree.tokens)
        put("build_parents", None, tree.parents)
    stops, most = of("stop_tokens"), of("max_emitted")
    limit = EmitLimit(
        frozenset() if stops is None else frozenset(stops.tolist()),
        None if most is None else int(most),
    )
    tree = DraftTree(tuple(of("tokens").tolist()), tuple(of("parents").tolist()))
    done = session.round(tree, limit=limit, trace=trace)
    put("path", None, done.acceptance.path)
    put("bonus", None, done.acceptance.bonus)
    put("emitted", None, done.emitted)


def told(info):
    """The `hello` of docs/stdio-protocol.md."""
    profile = info.profile
    dtypes = ("weights", "activations", "latents", "scores", "logits", "accumulation")
    return {
        "kdtr_stdio": 1,
        "name": info.name,
        "version": info.version,
        "device": info.device,
        "profile": {
            **{name: getattr(profile, name) for name in dtypes},
            "deterministic": profile.deterministic,
            "batch_invariant": profile.batch_invariant,
        },
        "verbs": sorted(info.verbs),
        "stages": sorted(info.stages),
        "conventions": dict(info.conventions),
    }


if __name__ == "__main__":
    from kdtr.conformance import load_engine

    answer(sys.argv[1], sys.argv[2], load_engine("host"))

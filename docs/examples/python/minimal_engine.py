"""The least that `kdtr gate` can judge: prefill, verify and commit, and no stage is shown.

    kdtr gate TINY.kdtr --engine minimal_engine:make_engine

Each line that says `host` borrows from the engine of this project; yours goes there.
"""

from dataclasses import replace

from kdtr.conformance import load_engine
from kdtr.contract import Verified


class Engine:
    def __init__(self):
        self._host = load_engine("host")
        verbs = frozenset({"prefill", "verify", "commit"})
        self.info = replace(self._host.info, name="mine", verbs=verbs, stages=frozenset())

    def load(self, source):  # a directory, a .kdtr file or a pair: docs/your-engine.md
        return Model(self._host.load(source))


class Model:
    def __init__(self, host):
        self._host = host
        self.close = host.close

    def open(self, *, max_len):
        return Session(self._host.open(max_len=max_len))


class Session:
    def __init__(self, host):
        self._host = host
        self.close = host.close

    committed_len = property(lambda self: self._host.committed_len)
    root = property(lambda self: self._host.root)

    def prefill(self, tokens):
        return self._host.prefill(tokens)  # the new root

    def verify(self, tree):  # tree.tokens, tree.parents
        done = self._host.verify(tree)
        return Verified(logits=done.logits, targets=done.targets)  # [n, w], and a token per node

    def commit(self, acceptance):  # acceptance.path, acceptance.bonus
        self._host.commit(acceptance)


make_engine = Engine

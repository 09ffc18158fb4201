"""The least that `kdtr gate` can judge: load, open, prefill, verify, commit, committed_len, root.

    kdtr gate build/golden/tiny.kdtr --engine minimal_engine:make_engine

The forward is borrowed from the host engine to keep this short; yours goes where `_borrowed` is.
"""

from dataclasses import replace

from kdtr.conformance import load_engine
from kdtr.contract import Verified


def make_engine():
    return Engine()


class Engine:
    def __init__(self):
        self._borrowed = load_engine("host")
        verbs = frozenset({"prefill", "verify", "commit"})
        shows_nothing = frozenset()  # then no verb is asked for a trace
        self.info = replace(self._borrowed.info, name="mine", verbs=verbs, stages=shows_nothing)

    def load(self, source):
        return Model(self._borrowed.load(source))


class Model:
    def __init__(self, borrowed):
        self._borrowed = borrowed

    def open(self, *, max_len):
        return Session(self._borrowed.open(max_len=max_len))

    def close(self):
        self._borrowed.close()


class Session:
    def __init__(self, borrowed):
        self._borrowed = borrowed

    @property
    def committed_len(self):
        return self._borrowed.committed_len

    @property
    def root(self):
        return self._borrowed.root

    def prefill(self, tokens):
        return self._borrowed.prefill(tokens)  # the new root

    def verify(self, tree):
        done = self._borrowed.verify(tree)  # logits [n, w]; tokens per node
        return Verified(logits=done.logits, targets=done.targets)

    def commit(self, acceptance):
        self._borrowed.commit(acceptance)  # acceptance.path, acceptance.bonus

    def close(self):
        self._borrowed.close()

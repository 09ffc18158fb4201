"""An engine with six faults, one for each of six kinds of model: to see what a report says of them.

    export PYTHONPATH=docs/examples/python
    kdtr gate conformance/corpus/{all-moe,half-split,latent-eps,no-q-lora,softmax,yarn}.kdtr \\
        --engine six_faults:make_engine --html build/six-faults.html

Each is a fault that a real engine had (docs/kill-matrix.md), planted in the engine of this project.
Other models find it without one.
"""

from kdtr.conformance import load_engine

PLANTED = "kdtr.conformance.mutants:make_engine"
FAULTS = (  # the fault, and the models that meet it
    ("position_by_index", lambda model: model.first_k_dense_replace == 0),  # POS-1, all-moe
    ("visibility_transposed", lambda model: not model.rope_interleave),  # MASK-2, half-split
    ("first_child_only", lambda model: model.latent_norm_eps > 1e-4),  # ACC-1, latent-eps
    ("no_compaction", lambda model: model.q_lora_rank is None),  # COMMIT-1, no-q-lora
    ("weights_from_biased", lambda model: model.scoring_func == "softmax"),  # MOE-3, softmax
    ("half_split_pairs", lambda model: model.yarn is not None),  # MLA-7, yarn
)


class Engine:
    def __init__(self):
        self._sound = load_engine("host")
        self.info = self._sound.info

    def load(self, source):
        model, _ = source
        for fault, meets in FAULTS:
            if meets(model):
                return load_engine(PLANTED, {"mutant": fault}).load(source)
        return self._sound.load(source)


make_engine = Engine

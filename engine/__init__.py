"""The production engine: absorb-form MLA over a paged latent cache, behind one set of kernels."""

from kdtr.engine.engine import make_cuda_engine, make_engine

__all__ = ["make_cuda_engine", "make_engine"]

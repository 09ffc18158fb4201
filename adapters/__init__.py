"""Real engines, made to speak the contract: each library is imported by its engine alone."""

from kdtr.adapters.hf_engine import make_hf_engine
from kdtr.adapters.llamacpp_engine import make_llamacpp_engine

__all__ = ["make_hf_engine", "make_llamacpp_engine"]

"""Every refusal kdtr makes, one class per thing that can be wrong.

The text says which thing, what it is, what it must be and, where we know it, what to do; it is
built from the same value as the check. A refusal comes before any state changes.
"""


class KdtrError(Exception):
    """Base of all refusals: a caller's mistake, never a fault of kdtr's own."""


class UnsupportedError(KdtrError):
    """The request is meaningful, but this version cannot do it; the text names what."""


class ConfigError(KdtrError):
    """A model configuration that is incomplete, contradictory or out of range."""


class CheckpointError(KdtrError):
    """A weight source with missing, extra or misshapen tensors, or files that cannot be read."""


class TreeError(KdtrError):
    """A draft tree that breaks TREE-1 or TREE-2, or does not fit the session (FWD-3)."""


class InputError(KdtrError):
    """Tokens, positions, masks, draft logits or targets of the wrong shape, dtype or range."""


class SessionError(KdtrError):
    """A verb called when the session's state does not allow it (COMMIT-5, a missing root)."""


class CacheError(KdtrError):
    """The round needs more slots than the session has (SLOT-3)."""


class BundleError(KdtrError):
    """A KDTR file that is foreign, truncated, altered or laid out against FORMAT.md."""


class EngineError(KdtrError):
    """An engine that cannot be loaded, or answers with something that is not an answer."""


class CaseError(KdtrError):
    """A golden case (prompt, trees, planted paths) that cannot be recorded as written."""

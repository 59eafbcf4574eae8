"""What several tests of the room begin with."""

import pytest

from livedraft.drafts.registry import Registry, new_version_id
from livedraft.drafts.weights import save_draft
from livedraft.records import DraftVersion
from tests.hf_folder import write_hf_folder
from tests.learning.toy import MODEL, one_layer_draft


@pytest.fixture
def state(tmp_path):
    """A state folder whose untrained draft of one layer serves; its target is the folder `model` beside it."""
    write_hf_folder(tmp_path / "model", MODEL.config, MODEL.tensors)
    draft = one_layer_draft()
    Registry(tmp_path / "state").publish(
        lambda path: save_draft(draft, path),
        DraftVersion(
            id=new_version_id(0),
            route="default",
            parent=None,
            sha256="",
            target_fingerprint=MODEL.fingerprint,
            tokenizer_fingerprint="t",
            num_layers=1,
            vocabulary_size=64,
            created_at=0.0,
        ),
        status="in_service",
    )
    return tmp_path / "state"

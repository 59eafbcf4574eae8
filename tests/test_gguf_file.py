"""The reader of GGUF files reads what the library's own does; that one is its slow twin."""

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from livedraft.gguf_file import open_gguf, read_gguf
from livedraft.records import UserError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_array("words", ["a", "", "Ġriver", "日本", "x" * 300])
    writer.add_array("kinds", [1, 2, 3, 4, -5])
    writer.add_array("scores", [0.5, -1.25])
    writer.add_array("flags", [True, False])
    writer.add_uint32("number", 7)
    writer.add_tensor("weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_are_those_of_the_library(file):
    theirs, ours = GGUFReader(file), open_gguf(file)
    contents = [{name: field.contents() for name, field in reader.fields.items()} for reader in (theirs, ours)]
    assert contents[0] == contents[1]
    assert contents[1]["words"] == ["a", "", "Ġriver", "日本", "x" * 300]
    assert [type(one) for one in contents[1]["kinds"]] == [int] * 5
    assert {name: field.types for name, field in theirs.fields.items()} == {n: f.types for n, f in ours.fields.items()}
    metadata, (weight,) = read_gguf(file)
    assert metadata == contents[0]
    assert (weight.name, weight.data.tolist()) == ("weight", np.arange(12).reshape(3, 4).tolist())


def test_a_file_cut_in_its_words_is_damaged(file):
    whole = file.read_bytes()
    for end in (whole.index("日本".encode()) + 3, whole.index(b"xxx") + 200, whole.index(b"words") + 20):
        file.write_bytes(whole[:end])
        with pytest.raises(UserError, match="damaged"):
            read_gguf(file)

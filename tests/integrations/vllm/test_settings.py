import pytest

from livedraft.records import UserError
from livedraft.settings import load_settings, load_vllm_settings


def test_the_table_vllm_is_read_beside_the_others_and_flags_go_over_it(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('[vllm]\npython = "a"\nnum_replicas = 2\narguments = ["--seed", "1"]\n[server]\nport = 9\n')
    settings, vllm = load_vllm_settings(
        file, {"vllm": {"python": "b", "attach": None}}, {"LIVEDRAFT_VLLM__TAP": "false"}
    )
    assert (vllm.python, vllm.num_replicas, vllm.arguments, vllm.tap) == ("b", 2, ("--seed", "1"), False)
    assert settings.server.port == 9
    with pytest.raises(UserError, match="There is no setting 'vllm'"):
        load_settings(file, {}, {})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "python must name the interpreter"),
        ({"python": "p", "num_replicas": 0}, "num_replicas must be at least 1"),
        ({"python": "p", "num_speculative_tokens": 0}, "for none give --draft none"),
        ({"attach": ("localhost:8000",)}, "attach takes URLs"),
        ({"python": "p", "replica_key": ""}, "replica_key must not be empty"),
        ({"pyhton": "p"}, "Did you mean python"),
    ],
)
def test_what_is_wrong_is_named(flags, words):
    with pytest.raises(UserError, match=words):
        load_vllm_settings(None, {"vllm": flags}, {})

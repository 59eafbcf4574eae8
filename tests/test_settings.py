import dataclasses

import pytest

from livedraft.cli.config import show
from livedraft.config import ServerConfig
from livedraft.records import UserError
from livedraft.settings import SECTIONS, Settings, load_settings


def load(tmp_path, text="", flags=None, environment=None):
    file = tmp_path / "livedraft.toml"
    file.write_text(text)
    return load_settings(file, flags or {}, environment or {})


def test_defaults_then_file_then_environment_then_flags(tmp_path):
    text = '[server]\nport = 1\nhost = "a"\nmax_queue = 1\n[model]\nname = "one"\n'
    environment = {"LIVEDRAFT_SERVER__PORT": "2", "LIVEDRAFT_SERVER__HOST": "b", "HOME": "/"}
    settings = load(tmp_path, text, {"server": {"port": 3, "max_queue": None}}, environment)
    assert (settings.server.port, settings.server.host, settings.server.max_queue) == (3, "b", 1)
    assert settings.model.name == "one"
    assert load_settings(None, {}, {}) == Settings()


def test_the_file_may_be_named_by_the_environment(tmp_path):
    (tmp_path / "s.toml").write_text("[server]\nport = 77\n")
    assert load_settings(None, {}, {"LIVEDRAFT_CONFIG": str(tmp_path / "s.toml")}).server.port == 77


def test_text_from_the_environment_becomes_the_fields_type(tmp_path):
    environment = {
        "LIVEDRAFT_MODEL__LEARN": "false",
        "LIVEDRAFT_ENGINE__KV_CACHE_GB": "1.5",
        "LIVEDRAFT_SERVER__API_KEYS": "one,two",
        "LIVEDRAFT_SPECULATION__METHOD": "none",
    }
    settings = load(tmp_path, environment=environment)
    assert settings.model.learn is False
    assert settings.engine.kv_cache_gb == 1.5
    assert settings.server.api_keys == ("one", "two")
    assert settings.speculation.method == "none"


@pytest.mark.parametrize(
    ("text", "environment", "words"),
    [
        ("[server]\nprot = 1\n", {}, ["'prot'", "livedraft.toml", "Did you mean port?"]),
        ("[sever]\nport = 1\n", {}, ["'sever'", "Did you mean server?"]),
        ("[server]\nzzz = 1\n", {}, ["'zzz'", "Known are host"]),
        ("server = 5\n", {}, ["must be a table"]),
        ("[server\n", {}, ["livedraft.toml", "cannot be read"]),
        ("[server]\nport = 99999\n", {}, ["port must lie in 0..65535"]),
        ('[server]\nport = "many"\n', {}, ["server.port", "livedraft.toml"]),
        ('[speculation]\nmethod = "eagle"\n', {}, ["speculation.method", "'draft_model'"]),
        ("", {"LIVEDRAFT_SERVER__PROT": "1"}, ["'prot'", "the environment", "port"]),
        ("", {"LIVEDRAFT_PORT": "1"}, ["LIVEDRAFT_PORT", "LIVEDRAFT_SERVER__"]),
        ("", {"LIVEDRAFT_SERVER__PORT": "many"}, ["server.port", "the environment"]),
    ],
)
def test_what_is_wrong_is_named_with_its_source(tmp_path, text, environment, words):
    with pytest.raises(UserError) as caught:
        load(tmp_path, text, environment=environment)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named():
    from pathlib import Path

    with pytest.raises(UserError, match=r"all\.toml is not there"):
        load_settings(Path("/nowhere/at/all.toml"), {}, {})


def test_shown_settings_hide_keys_and_hold_every_field(tmp_path):
    shown = load(tmp_path, '[server]\napi_keys = ["secret"]\n').shown()
    assert "secret" not in repr(shown)
    assert shown["server"]["api_keys"] == ["***"]
    assert {section: set(values) for section, values in shown.items()} == {
        section: {field.name for field in dataclasses.fields(kind)} for section, kind in SECTIONS.items()
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", -1), ("api_keys", ("",)), ("max_queue", -1), ("max_request_bytes", 0), ("request_timeout_seconds", 0)],
)
def test_server_settings_are_checked(field, value):
    with pytest.raises(ValueError, match=field):
        ServerConfig(**{field: value})


def test_rules_of_routes_are_tables_and_what_is_shown_can_be_read_again(tmp_path, capsys):
    file = tmp_path / "settings.toml"
    file.write_text(
        '[routing]\nby = ["language"]\n'
        '[[routing.rules]]\nroute = "shop"\nlanguage = "de"\n[[routing.rules]]\nroute = "acme"\napi_key = "secret"\n'
    )
    settings = load_settings(file, {}, {})
    assert [rule.route for rule in settings.routing.rules] == ["shop", "acme"]
    show(settings, as_json=False)
    shown = capsys.readouterr().out
    assert "secret" not in shown
    file.write_text(shown.replace('["***"]', '["k"]'))
    again = load_settings(file, {}, {})
    assert again.routing.by == ("language",)
    assert [(rule.route, rule.api_key) for rule in again.routing.rules] == [("shop", None), ("acme", "***")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[routing.rules]]\nroute = "shop"\n', "needs api_key, language or system_prompt_contains"),
        ('[[routing.rules]]\nroute = "A shop"\nlanguage = "de"\n', "route must be 1 to 40 lower-case letters"),
        ('[routing]\nby = ["weather"]\n', "routing.by"),
        ("[routing]\nmax_drafts = 0\n", "max_drafts must be at least 1"),
    ],
)
def test_a_wrong_routing_setting_is_named(tmp_path, text, message):
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_settings(file, {}, {})

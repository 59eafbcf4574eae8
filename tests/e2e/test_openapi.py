"""Whatever the served OpenAPI document allows, and more, never gets a 5xx."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.e2e.server_process import TINY_ENVIRONMENT, ServerProcess

OPERATIONS = [
    ("get", "/health"),
    ("get", "/metrics"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{model}"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
]


ADMIN = [
    ("get", "/admin/drafts"),
    ("get", "/admin/drafts/{version_id}"),
    ("get", "/admin/drafts/{first_id}/diff/{second_id}"),
    ("post", "/admin/drafts/{version_id}/promote"),
    ("post", "/admin/rollback"),
    ("get", "/admin/routes"),
    ("post", "/admin/routes/{route}/close"),
    ("get", "/admin/learn"),
    ("post", "/admin/learn/pause"),
    ("post", "/admin/learn/resume"),
    ("post", "/admin/learn/now"),
    ("get", "/admin/events"),
    ("get", "/admin/traces"),
    ("delete", "/admin/traces"),
]
KEY = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def api(model_folder, tmp_path_factory):
    state = tmp_path_factory.mktemp("fuzzed") / "state"
    options = ("--served-model-name", "m", "--max-model-len", 128, "--state", state, "--admin-key", "boss")
    with ServerProcess(model_folder, *options, **TINY_ENVIRONMENT) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_operation_is_fuzzed_below(api):
    found = {(operation.ok().method, operation.ok().path) for operation in api.get_all_operations()}
    assert found == {*OPERATIONS, *ADMIN}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("mode", "method", "path"),
    [(GenerationMode.POSITIVE, *operation) for operation in ADMIN]
    + [
        (GenerationMode.NEGATIVE, *operation)
        for operation in ADMIN
        if operation[1] in ("/admin/events", "/admin/traces")
    ],
)
def test_no_input_to_admin_gets_a_5xx(api, method, path, mode):
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def fuzz(case):
        response = case.call(headers=KEY)
        assert response.status_code < 500, (response.text, case.path_parameters, case.query)

    fuzz()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("mode", "method", "path"),
    [(GenerationMode.POSITIVE, *operation) for operation in OPERATIONS]
    + [(GenerationMode.NEGATIVE, *operation) for operation in OPERATIONS if operation[0] == "post"],
)
def test_no_input_gets_a_5xx(api, method, path, mode):
    statuses = set()

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def fuzz(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "m"  # or nearly every case would end at an unknown model
        response = case.call()
        statuses.add(response.status_code)
        assert response.status_code < 500, (response.text, case.body)

    fuzz()
    if method == "post" and mode is GenerationMode.NEGATIVE:
        assert 400 in statuses

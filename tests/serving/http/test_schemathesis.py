"""schemathesis draws requests from the app's own OpenAPI document, right and wrong ones, and holds the app to it."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.http.app import create_app

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]


# Of an engine that is never started: what it says of the app does not depend on it.
SCHEMA = schemathesis.openapi.from_dict(create_app(AsyncLLMEngine.spawn("tiny")).openapi())


@pytest.fixture(scope="module")
def server(make_server):
    """A real server whose answers are short."""
    return make_server(max_output_tokens=3, max_choices=4)


@SCHEMA.parametrize()
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_app_does_what_its_openapi_document_says(case, server):
    response = case.call(base_url=server.url, timeout=60)
    case.validate_response(response, checks=CHECKS)
    if response.status_code >= 400:
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}

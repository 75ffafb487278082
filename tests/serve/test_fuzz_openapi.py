"""The OpenAPI document says what comes back, and requests made up from it find no failure of the server's.

The fuzz needs schemathesis on the path (pip install schemathesis).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from forerun import Engine
from reference.live_server import LiveServer

ERRORS = {"4XX", "5XX"}


@pytest.fixture(scope="module")
def short(served: Path) -> Iterator[LiveServer]:
    """Answers are short, however many tokens are asked for."""
    engine = Engine(served, kv_tokens=4096, max_model_len=128, threads=1, cache_weights=False, draft_len=4, max_rows=8)
    with LiveServer(engine) as live:
        yield live
        live.check_idle()


def test_the_document_names_endpoints_and_errors(short: LiveServer) -> None:
    document = httpx.get(short.url + "/openapi.json").json()
    paths = document["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/tokenize", "/v1/detokenize"):
        operation = paths[path]["post"]
        assert "application/json" in operation["requestBody"]["content"]
        assert operation["responses"].keys() >= {"200", *ERRORS}
        assert "422" not in operation["responses"]  # what isn't valid is a 400, as OpenAI has it
    assert "text/event-stream" in paths["/v1/completions"]["post"]["responses"]["200"]["content"]
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/models/{name}"):
        assert paths[path]["get"]["responses"].keys() >= {"200", *ERRORS}
    schema = document["components"]["schemas"]["CompletionRequest"]
    assert schema["additionalProperties"] is False
    assert "prompt" in schema["required"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_requests_from_the_document_find_no_failure(short: LiveServer, tmp_path: Path) -> None:
    found = shutil.which("schemathesis")
    if found is None:
        pytest.skip("schemathesis is not installed")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    done = subprocess.run(
        [found, "run", short.url + "/openapi.json", "--checks", checks, "--max-examples", "100", "--seed", "1",
         "--request-timeout", "60"],
        cwd=tmp_path, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True, timeout=1000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert httpx.get(short.url + "/health").status_code == 200

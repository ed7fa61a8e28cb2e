"""Files that are nearly valid: a good one with a few changes, as bytes, as lines, as JSON, as tensors."""

import json
import struct
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

HOSTILE = "\x1b]0;owned\x07\u202e</script>\u2028\ud800"
HUGE = [2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, 10**30, -1, 0, 1, 7]
VALUES: list[Any] = [
    *HUGE,
    *(None, True, False, 0.5, -0.0, 1e-320, float("nan"), float("inf"), float("-inf")),
    *("", "a", "../../etc/passwd", "/etc/passwd", HOSTILE, "x" * 5000, "1", "true", "null"),
    *([], {}, [[]], [None], {"": {}}, [HOSTILE] * 3, {HOSTILE: HOSTILE}, list(range(3000))),
]
NESTED = "\0nested"  # stands for more levels than anything reads
PARTS = [b"", b"\0", b"\xff", b"\n", b"\r", b"\t", b"\xed\xa0\x80", b"\x1b[2J", b'"', b"[" * 50, b"9" * 5000]
PARTS += [struct.pack("<Q", number) for number in (0, 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1)]
place = st.floats(0, 1, exclude_max=True)


@st.composite
def bytes_of(draw, whole: bytes) -> bytes:
    """Cut off, overwritten, left out, put in, or doubled at a place, which is often in the beginning."""
    at = int(draw(place) ** draw(st.sampled_from([1, 1, 4])) * len(whole))
    size = draw(st.sampled_from([1, 2, 8, 100]))
    how, part = draw(st.integers(0, 5)), draw(st.sampled_from(PARTS))
    if how == 0:
        return whole[:at]
    if how == 1:
        return whole[:at] + bytes([draw(st.integers(0, 255))]) + whole[at + 1 :]
    if how == 2:
        return whole[:at] + whole[at + size :]
    if how == 3:
        return whole[:at] + part + whole[at:]
    if how == 4:
        return whole[:at] + part + whole[at + len(part) :]
    return whole[: at + size] + whole[at:]


@st.composite
def lines_of(draw, whole: bytes, separator: bytes = b"\t") -> bytes:
    """A field of a line, or a line, is replaced, left out, or doubled."""
    lines = whole.split(b"\n")
    i, other = (int(draw(place) * len(lines)) for _ in range(2))
    fields = lines[i].split(separator)
    k, how = int(draw(place) * len(fields)), draw(st.integers(0, 5))
    if how == 0:
        fields[k] = draw(st.sampled_from([*PARTS, *(str(number).encode() for number in HUGE)]))
    elif how == 1:
        fields[k] = draw(st.sampled_from([b"1-2", b"1.1", b"2-1", b"1-99999999", b"_", b"0", b"-1"]))
    elif how == 2:
        del fields[k]
    elif how == 3:
        fields[k] = fields[int(draw(place) * len(fields))]
    lines[i] = separator.join(fields)
    if how == 4:
        lines[i] = lines[other]
    elif how == 5:
        del lines[i]
    return b"\n".join(lines)


def spots(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value with each of its keys; of long lists a few."""
    found, todo = [], [value]
    while todo:
        part = todo.pop()
        keys = list(part) if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else []
        for key in keys if len(keys) < 80 else [*keys[:3], *keys[-3:]]:
            found.append((part, key))
            todo.append(part[key])
    return found


def dumped(value: Any) -> bytes:
    text = json.dumps(value).replace(json.dumps(NESTED), "[" * 100_000 + "]" * 100_000)
    return text.encode()


@st.composite
def values_of(draw, whole: Any) -> Any:
    """A value of a JSON document is replaced or left out, or its key changed."""
    copy = json.loads(json.dumps(whole))
    for _ in range(draw(st.sampled_from([1, 1, 2, 4]))):
        if not (all_spots := spots(copy)):
            return copy
        part, key = all_spots[int(draw(place) * len(all_spots))]
        how = draw(st.integers(0, 9))
        if how == 0:
            del part[key]
        elif how == 1 and isinstance(part, dict):
            part[draw(st.sampled_from(["", HOSTILE, "x" * 300, "../a", "__class__"]))] = part.pop(key)
        elif how == 2:
            other, name = all_spots[int(draw(place) * len(all_spots))]
            part[key] = json.loads(json.dumps(other[name])) if name in other or isinstance(other, list) else 0
        elif how == 3:
            part[key] = NESTED
        else:
            part[key] = deepcopy(draw(st.sampled_from(VALUES)))
    return copy


@st.composite
def json_of(draw, whole: bytes) -> bytes:
    """A JSON document, sometimes with a key twice."""
    text = dumped(draw(values_of(json.loads(whole))))
    if draw(st.integers(0, 9)) == 0:
        text = text.replace(b"{", b'{"kind": 1, "kind": 2, ', 1)
    return text


@st.composite
def json_lines_of(draw, whole: bytes) -> bytes:
    """A document in a file of one a line."""
    lines = whole.splitlines()
    i = int(draw(place) * len(lines))
    lines[i] = draw(json_of(lines[i]))
    return b"\n".join([*lines, b""])


@st.composite
def tensors_of(draw, whole: bytes) -> bytes:
    """The header of a safetensors file, with its length put right, or not."""
    length = int.from_bytes(whole[:8], "little")
    header = dumped(draw(values_of(json.loads(whole[8 : 8 + length]))))
    said = draw(st.sampled_from([len(header)] * 9 + [0, 2**20, 2**40, 2**64 - 1]))
    return struct.pack("<Q", said) + header + whole[8 + length :]


def file_of(name: str, whole: bytes) -> st.SearchStrategy[bytes]:
    """What may have become of a file, by its ending."""
    how = [bytes_of(whole)]
    if name.endswith(".json"):
        how += [json_of(whole)] * 3
    elif name.endswith(".jsonl"):
        how += [json_lines_of(whole)] * 3
    elif name.endswith(".safetensors"):
        how += [tensors_of(whole)] * 2
    elif name.endswith((".conllu", ".txt")):
        how += [lines_of(whole, b"\t" if name.endswith("u") else b" ")] * 3
    elif name.endswith(".yaml"):
        how += [lines_of(whole, b": ")]
    return st.one_of(how)

"""Bytes that are nearly right: good examples of a format, damaged as disks, editors and attackers damage them.

`EXAMPLES` is how many are tried of each property: few in `make test`, more in `make fuzz`, which sets
WARPWATCH_FUZZ_EXAMPLES and goes on with other seeds until its time is over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("WARPWATCH_FUZZ_EXAMPLES", "25"))
#: CPU time that no input of a few kilobytes may take: a busy machine does not lengthen it.
MOST_CPU_S = 10.0

#: Pieces that parsers stumble over: ends of ranges, other digits, signs of every format, bytes that are no UTF-8.
_PIECES = (
    b"",
    b"\0",
    b"\n",
    b"\r\n",
    b" ",
    b"\t",
    b",",
    b":",
    b"=",
    b"-",
    b"-1",
    b"0",
    b"1e999",
    b"-1e999",
    b"NaN",
    b"Infinity",
    b"1_0",
    b"+5",
    b"18446744073709551615",
    b"18446744073709551616",
    b"9" * 400,
    b"9" * 5000,
    b"null",
    b"true",
    b"[",
    b"]",
    b"{",
    b"}",
    b"[" * 3000,
    b'{"a":' * 3000,
    b'"',
    b"'",
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b"%",
    b"\x80",
    b"\xff\xfe",
    b"\xc3\xa9",
    "\u0663\u00b2\u2028\u0085".encode(),
    b"\x1f\x8b\x08",
    b"\x28\xb5\x2f\xfd",
    b"a" * 2000,
    b"../../etc/passwd",
    b"&a [*a,*a]",
    b"!!python/object/apply:os.system",
)


def profile(share: float = 1.0) -> settings:
    """Return the settings of a property; `share` of the usual number where a single example is dear."""
    return settings(
        max_examples=max(5, int(EXAMPLES * share)),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


@st.composite
def damaged(draw: st.DrawFn, examples: Sequence[bytes]) -> bytes:
    """Draw one of the examples with up to six edits; or, one time in eight, bytes that come from nowhere."""
    if draw(st.integers(0, 7)) == 0:
        return draw(st.binary(max_size=400))
    data = draw(st.sampled_from(examples))
    for _ in range(draw(st.integers(1, 6))):
        begin = draw(st.integers(0, len(data)))
        end = min(len(data), begin + draw(st.sampled_from((0, 0, 1, 1, 2, 5, 20, 300))))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            new = draw(st.sampled_from(_PIECES))
        elif kind == 1:
            new = draw(st.binary(min_size=1, max_size=3))
        elif kind == 2:
            new = data[begin:end] * 3
        elif kind == 3:
            other = draw(st.sampled_from(examples))
            start = draw(st.integers(0, len(other)))
            new = other[start : start + 40]
        else:  # cut off
            new, end = b"", len(data)
        data = data[:begin] + new + data[end:]
    return data


@contextmanager
def in_time() -> Iterator[None]:
    """Fail where the block takes more CPU time than any small input may."""
    began = time.process_time()
    yield
    taken = time.process_time() - began
    assert taken < MOST_CPU_S, f"{taken:.1f} s of CPU time"

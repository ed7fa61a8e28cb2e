"""Files that someone made, or broke, are read or refused: in a line, within memory, whatever is in them."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.untrusted.mutations import file_of
from tests.untrusted.readers import READERS, bounded

MOST = 2**30  # bytes of memory beyond what is in use before
ONE_LINE = 4010  # characters


def is_readable(message: str) -> bool:
    """A line that a terminal can show; of a configuration one for each problem."""
    lines = message.split("\n")
    several = lines[0].endswith(" problems in the configuration:") and all(x[:2] == "  " for x in lines[1:])
    return all(map(str.isprintable, lines)) and len(message) < ONE_LINE and (several or len(lines) == 1)


@pytest.fixture(scope="module")
def reader_of(tmp_path_factory):
    made = {}

    def reader(make):
        if make not in made:
            made[make] = make(tmp_path_factory.mktemp(make.__name__))
        return made[make]

    return reader


def fuzz(reader, cases: int) -> Counter:
    """How many cases there were, and how many of them were refused."""
    count: Counter = Counter()

    @settings(max_examples=cases, database=None, suppress_health_check=[*HealthCheck])
    @given(st.data())
    def holds(data):
        name = data.draw(st.sampled_from([*reader.files]))
        content = data.draw(file_of(name, reader.files[name]))
        message = reader.refusal(name, content)
        count["cases"] += 1
        count["refused"] += message is not None
        assert message is None or is_readable(message), message

    with bounded(MOST):
        holds()
    return count


@pytest.mark.parametrize("make", READERS, ids=lambda make: make.__name__)
def test_a_changed_file_is_read_or_refused_in_a_line(make, reader_of):
    count = fuzz(reader_of(make), 100)
    assert count["cases"] >= 100
    assert count["refused"] > 30


@pytest.mark.slow
@pytest.mark.parametrize("make", READERS, ids=lambda make: make.__name__)
def test_so_are_thousands(make, reader_of):
    assert fuzz(reader_of(make), 2000)["cases"] >= 2000

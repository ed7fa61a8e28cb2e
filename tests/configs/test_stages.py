"""Stages of data: the same from file and command line, printed so that they read back, wrong ones named."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from configs.cli import parse, read_yaml, to_yaml, validate
from configs.schema import Data
from tests.configs.asked import config, refused, write

NAMES = ["shakespeare", "repeats", "backcopy"]
WEIGHTS = st.dictionaries(st.sampled_from(NAMES), st.floats(1e-6, 1e6), min_size=1)
ONE = {"weights": {"repeats": 1}}
TWO = [{"until": 5, **ONE}, {"weights": {"shakespeare": 7, "repeats": 1}}]


def stages(values: list) -> list[str]:
    return ["--data.stages", json.dumps(values)]


@st.composite
def any_stages(draw: st.DrawFn) -> list[dict]:
    ends = sorted(draw(st.sets(st.integers(1, 10**6), max_size=4)))
    return [{"until": end, "weights": draw(WEIGHTS)} for end in ends] + [{"weights": draw(WEIGHTS)}]


@given(any_stages())
def test_stages_from_the_command_line_are_those_of_a_file_and_print_as_what_reads_back(wanted):
    asked = config(*stages(wanted))
    assert validate({"data": {"stages": wanted}}).data == asked.data
    found = [stage.model_dump(exclude_none=True) for stage in asked.data.stages]
    assert found == wanted
    assert [list(stage["weights"]) for stage in found] == [list(stage["weights"]) for stage in wanted]


def test_a_file_with_stages_resolves_to_one_that_is_equal(tmp_path):
    path = write(
        tmp_path,
        "data:\n  stages:\n    - until: 5\n      weights: {repeats: 1}\n"
        "    - weights: {shakespeare: 7, repeats: 1}\n",
    )
    asked = config("--config", path)
    assert asked == config(*stages(TWO))
    assert config("--config", write(tmp_path, to_yaml(asked))) == asked
    assert config("--config", path, "--data.stages", "[]") == config()


@pytest.mark.parametrize(
    ("source", "wanted", "sources"),
    [
        ("shakespeare", [], ["shakespeare"]),
        ("shakespeare", TWO, ["shakespeare", "repeats"]),
        ("repeats", [ONE], ["repeats"]),
        (
            "backcopy",
            [{"until": 1, **ONE}, {"weights": {"shakespeare": 1, "repeats": 1}}],
            ["backcopy", "repeats", "shakespeare"],
        ),
    ],
)
def test_sources_in_use_are_that_of_validation_and_then_those_of_the_stages(source, wanted, sources):
    assert Data(source=source, stages=wanted).sources == sources


def test_a_text_of_ones_own_may_stand_in_a_stage_alone_and_needs_its_path():
    wanted = stages([{"until": 5, **ONE}, {"weights": {"text": 1}}])
    assert config(*wanted, "--data.source", "repeats", "--data.path", "a.txt").data.path == "a.txt"
    assert "data.path" in refused(*wanted)


def test_the_share_kept_for_validation_means_something_where_any_stage_has_text():
    share = ["--data.source", "repeats", "--data.val_fraction", "0.2"]
    assert config(*share, *stages([{"weights": {"shakespeare": 1}}])).data.val_fraction == 0.2
    assert "val_fraction" in refused(*share, *stages([ONE]))


def refused_values(wanted: list) -> str:
    """As from a file, without one: JSON has no word for some of these."""
    with pytest.raises(UserError) as caught:
        validate({"data": {"stages": wanted}})
    return str(caught.value)


EXISTS = "'shakespeare', 'text', 'hf', 'repeats' or 'backcopy'"
WRONG = {
    "unknown source": ([{"weights": {"repeat": 1}}], ["data.stages.0.weights:", EXISTS, "'repeat'"]),
    "source that is no name": ([{"weights": {"2": 1}}], ["data.stages.0.weights:", EXISTS, "'2'"]),
    "weight 0": ([{"weights": {"repeats": 0}}], ["stages.0.weights:", "above 0", "repeats 0"]),
    "negative": ([{"until": 1, **ONE}, {"weights": {"repeats": -2}}], ["stages.1", "above 0", "repeats -2"]),
    "nan": ([{"weights": {"repeats": float("nan")}}], ["stages.0.weights.repeats", "finite", "nan"]),
    "infinity": ([{"weights": {"repeats": float("inf")}}], ["stages.0.weights.repeats", "finite", "inf"]),
    "text": ([{"weights": {"repeats": "many"}}], ["stages.0.weights.repeats", "number", "'many'"]),
    "true": ([{"weights": {"repeats": True}}], ["stages.0.weights", "true or false", "repeats"]),
    "no weights": ([{"weights": {}}], ["stages.0.weights", "must not be empty"]),
    "weights missing": ([{"until": 3}, ONE], ["stages.0.weights", "is missing", "{'until': 3}"]),
    "weights in a list": (
        [{"weights": ["repeats"]}],
        ["stages.0.weights", "keys with values", "['rep"],
    ),
    "a name for a stage": (["repeats"], ["stages.0", "keys with values", "'repeats'"]),
    "until 0": ([{"until": 0, **ONE}, ONE], ["stages.0.until", "1", "got 0"]),
    "until a fraction": ([{"until": 1.5, **ONE}, ONE], ["stages.0.until", "integer", "1.5"]),
    "until true": ([{"until": True, **ONE}, ONE], ["stages.0.until", "true or false"]),
    "until falls": ([{"until": 9, **ONE}, {"until": 5, **ONE}, ONE], ["must rise", "9, 5, none"]),
    "until stays": ([{"until": 5, **ONE}, {"until": 5, **ONE}, ONE], ["must rise", "5, 5, none"]),
    "until missing": ([ONE, {"until": 5, **ONE}, ONE], ["'until'", "none, 5, none"]),
    "until on the last": ([{"until": 5, **ONE}], ["only the last has none", "got 5"]),
    "unknown key": ([{"untill": 5, **ONE}], ["stages.0.untill", "nearest: data.stages.0.until"]),
    "key of a section": ([{"steps": 5, **ONE}], ["stages.0.steps: no such key; nearest: data.stages.0."]),
}


@pytest.mark.parametrize(("wanted", "words"), WRONG.values(), ids=WRONG)
def test_wrong_stages_are_refused_in_one_line_that_says_where_and_what(wanted, words):
    for message in (refused(*stages(wanted)), refused_values(wanted)):
        assert "\n" not in message
        assert all(word in message for word in words), message
        assert not re.search(r"dictionary|instance|Stage\b|after validation|\[key\]", message)


@pytest.mark.parametrize("word", ["5", "repeats", "null", "", "[5]", '[{"weights": {}', "[{1:}]"])
def test_what_is_no_list_of_stages_is_refused_in_one_line_from_the_command_line(word):
    message = refused("--data.stages", word)
    assert message.startswith(("data.stages", "--data.stages"))
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5", ["data.stages: must be a list; got 5"]),
        ("{weights: {repeats: 1}}", ["data.stages: must be a list", "repeats"]),
        ("[{weights: {repeats: yes}}]", ["data.stages.0.weights", "true or false"]),
        ("[{weights: {2: 1}}]", ["data.stages.0.weights:", EXISTS, "got 2"]),
        ("[{weights: {repeats: 1, repeats: 2}}]", ["a key stands twice"]),
    ],
)
def test_what_is_no_list_of_stages_is_refused_in_one_line_from_a_file(text, words, tmp_path):
    message = refused("--config", write(tmp_path, f"data:\n  stages: {text}\n"))
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_weight_may_be_written_as_yaml_reads_it_as_text(tmp_path):
    path = write(tmp_path, "data: {stages: [{weights: {repeats: 1e-3}}]}")
    assert config("--config", path).data.stages[0].weights == {"repeats": 1e-3}


@pytest.mark.parametrize("other", [[], [ONE], [{**TWO[0], "until": 6}, TWO[1]], [TWO[0], ONE]], ids=str)
def test_a_resumed_run_keeps_its_stages(other, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(config(*stages(TWO))))
    assert (
        parse(["--resume", str(tmp_path), *stages(TWO)]).config.data.stages
        == config(*stages(TWO)).data.stages
    )
    message = refused("--resume", str(tmp_path), *stages(other))
    assert re.search(r'a resumed run keeps data\.stages \(was .*"until": 5.*, asked \[.*\]\)', message)
    assert "\n" not in message
    assert read_yaml(tmp_path / "config.yaml", "")["data"]["stages"][0]["until"] == 5

"""Sentences of CoNLL-U files: text, spans and heads as the file says, and broken lines by their number."""

import tempfile
from pathlib import Path

import conllu
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from data.treebank import LONGEST_LINE, read_treebank

OURS = Path(__file__).with_name("treebank.conllu")
TEXTS = [
    "The old dog chased a red ball.",
    "She doesn't know the answer.",
    "Zoë's café opened very early.",
    "The letter was written by Noël.",
    "Ada likes green tea and Ben coffee.",
    "On Monday, we left the village.",
    "Where did they go after lunch?",
    "What have you eaten today?",
    "Here comes the last train.",
    "We're gonna win this match.",
    "I dunno the way.",
    "You cannot enter without a ticket.",
    "“That sounds fair,” said the judge.",
    "Cats, dogs and birds sleep a lot.",
    "I think that it works because we tested it.",
    "The garden grows 🌱 without much water.",
    "The new bridge cost 10 000 francs.",
    "Three days ago he lost his key near the gate.",
    "Then something strange happened to us.",
    "Sleep well he must at night.",
    "Quickly the boys both ran home.",
    "Well, Björn never answers letters from strangers.",
    "The well-known singer left (at noon).",
    "It won't go there again!",
    "Yes",
]


def row(identity, form, head="0", relation="root", misc="_") -> str:
    return "\t".join([str(identity), form, "_", "_", "_", "_", str(head), relation, "_", misc])


GOOD = [row(1, "Birds", 2, "nsubj"), row(2, "sing", 0, "root", "SpaceAfter=No"), row(3, ".", 2, "punct")]


def read(lines: list[str], end: str = "\n", start: bytes = b""):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.conllu"
        path.write_bytes(start + end.join(lines).encode())
        return read_treebank(path)


def refused(lines: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        read(lines)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def words(sentence) -> list[str]:
    return [sentence.text[word.begin : word.end] for word in sentence.words]


def test_texts_are_those_that_one_would_write():
    assert [sentence.text for sentence in read_treebank(OURS)] == TEXTS


def test_contractions_are_split_where_their_words_make_them_letter_by_letter_and_shared_elsewhere():
    sentences = read_treebank(OURS)
    assert words(sentences[1])[:4] == ["She", "does", "n't", "know"]
    assert words(sentences[2])[:3] == ["Zoë", "'s", "café"]
    assert words(sentences[9])[:5] == ["We", "'re", "gon", "na", "win"]
    assert words(sentences[10]) == ["I", "dunno", "dunno", "dunno", "the", "way", "."]
    assert words(sentences[16])[4] == "10 000"


def test_heads_are_words_of_the_sentence_roots_and_underscores_none_and_subtypes_are_left_out():
    passive, without = read_treebank(OURS)[3], read_treebank(OURS)[21]
    assert [(word.head, word.relation) for word in passive.words] == [
        (1, "det"),
        (3, "nsubj"),
        (3, "aux"),
        (None, "root"),
        (5, "case"),
        (3, "obl"),
        (3, "punct"),
    ]
    assert words(without)[5] == "letters"
    assert without.words[5].head is None


def test_an_empty_node_is_no_word_and_shifts_none():
    sentence = read_treebank(OURS)[4]
    assert words(sentence) == ["Ada", "likes", "green", "tea", "and", "Ben", "coffee", "."]
    assert words(sentence)[sentence.words[6].head] == "Ben"


def test_empty_nodes_are_counted_from_the_word_before_them_and_the_last_word_can_be_a_head():
    lines = [
        row("0.1", "x"),
        row(1, "On", 3),
        row("1.1", "x"),
        row("1.2", "x"),
        row(2, "and", 3),
        row("2.1", "x"),
    ]
    (sentence,) = read([*lines, row(3, "on")])
    assert words(sentence) == ["On", "and", "on"]
    assert [word.head for word in sentence.words] == [2, 2, None]


def test_every_word_knows_its_line():
    lines = OURS.read_text(encoding="utf-8").split("\n")
    for sentence in read_treebank(OURS):
        for word in sentence.words:
            form = lines[word.line - 1].split("\t")[1]
            assert sentence.text[word.begin : word.end] in (form, "dunno")


def test_it_says_what_conllu_itself_reads():
    parsed = conllu.parse(OURS.read_text(encoding="utf-8"))
    for ours, theirs in zip(read_treebank(OURS), parsed, strict=True):
        own = [(word.head, word.relation) for word in ours.words]
        rows = [token for token in theirs if isinstance(token["id"], int)]
        assert own == [((t["head"] or 0) - 1 if t["head"] else None, t["deprel"].split(":")[0]) for t in rows]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("tail", [[], [""], ["", "", "# the end"]])
def test_ends_of_lines_marks_of_utf8_and_missing_last_lines_change_nothing(end, start, tail):
    sentence, again = read(["# one", *GOOD, "", "", "# two", "# more", *GOOD, *tail], end, start)
    assert sentence.text == again.text == "Birds sing."
    assert [word.line for word in again.words] == [9, 10, 11]


@given(
    st.lists(st.tuples(st.text(st.sampled_from("aé'  \u2028\x85"), min_size=1), st.booleans()), min_size=1)
)
def test_a_text_is_its_forms_and_the_spaces_between_and_spans_give_the_forms(tokens):
    space = ["_" if spaced else "Gloss=x|SpaceAfter=No" for _, spaced in tokens]
    (sentence,) = read([row(n, form, misc=space[n - 1]) for n, (form, _) in enumerate(tokens, 1)])
    assert words(sentence) == [form for form, _ in tokens]
    whole = "".join(form + " " * spaced for form, spaced in tokens)
    assert sentence.text == (whole[:-1] if tokens[-1][1] else whole)


@pytest.mark.parametrize("forms", [["do", "n't"], ["I", "'d", "'ve"], ["de", "le"], ["a"], ["abc", "de"]])
@pytest.mark.parametrize("surface", ["don't", "I'd've", "du", "a", "A"])
def test_words_of_a_multi_word_token_have_parts_of_it_or_the_whole(forms, surface):
    lines = [row(f"2-{1 + len(forms)}", surface, "_", "_", "SpaceAfter=No")]
    lines += [row(n, form, misc="SpaceAfter=No") for n, form in enumerate(forms, 2)]
    (sentence,) = read([row(1, "x"), *lines, row(2 + len(forms), "?")])
    assert sentence.text == f"x {surface}?"
    assert words(sentence)[1:-1] == (forms if "".join(forms) == surface else [surface] * len(forms))


BROKEN = {
    "no columns": ("Birds", "1 columns"),
    "spaces for tabs": (row(2, "sing").replace("\t", "  "), "1 columns"),
    "a column too few": (row(2, "sing").removesuffix("\t_"), "9 columns"),
    "a column too many": (row(2, "sing") + "\tx", "11 columns"),
    "no form": (row(2, ""), "no form"),
    "a huge line": (row(2, "s" * LONGEST_LINE), "characters"),
    "an id twice": (row(1, "sing"), "order"),
    "an id left out": (row(3, "sing"), "order"),
    "id zero": (row(0, "sing"), "order"),
    "no id": (row("_", "sing"), "order"),
    "an id that is no number": (row("x2", "sing"), "'x2'"),
    "a negative id": (row("-2", "sing"), "'-2'"),
    "an id of a thousand digits": (row("9" * 5000, "sing"), "id"),
    "an empty node of another word": (row("2.1", "sing"), "order"),
    "an empty node left out": (row("1.2", "sing"), "order"),
    "a head that is no number": (row(2, "sing", "x"), "'x'"),
    "a head of a thousand digits": (row(2, "sing", "9" * 5000), "head"),
    "a head behind the end": (row(2, "sing", 4), "head 4"),
    "a negative head": (row(2, "sing", -1), "head -1"),
    "itself as the head": (row(2, "sing", 2), "head 2"),
    "a range of words gone by": (row("1-2", "sing"), "order"),
    "a range of words to come": (row("3-4", "sing"), "order"),
    "a range that ends before it begins": (row("3-2", "sing"), "'3-2'"),
}


@pytest.mark.parametrize(("line", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_named_by_file_and_number(line, says):
    message = refused(["# about", *GOOD, "", "# more", GOOD[0], line, GOOD[2], "", *GOOD])
    assert "some.conllu, line 8: " in message
    assert says in message


@pytest.mark.parametrize(
    ("ranges", "line"),
    [({1: "1-4"}, 1), ({1: "1-2", 2: "2-3"}, 3), ({3: "3-9"}, 3), ({1: "1-3", 3: "3-3"}, 4)],
)
def test_a_range_of_words_that_are_not_there_or_in_another_range_is_wrong(ranges, line):
    lines = []
    for n, word in enumerate(GOOD, 1):
        lines += [row(ranges[n], "x", "_", "_")] if n in ranges else []
        lines.append(word)
    assert f"line {line}: " in refused(lines)


def test_words_of_two_sentences_are_not_mixed():
    """The head must be a word of its own sentence, and counting starts again."""
    assert "line 5: head 3" in refused([*GOOD, "", row(1, "Yes", 3)])
    assert "line 5: id out of order" in refused([*GOOD, "", row(4, "Yes")])


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.conllu"
    path.write_bytes("\n".join([*GOOD, "", row(1, "café")]).encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.conllu, line 5: not UTF-8"):
        read_treebank(path)


@pytest.mark.parametrize("lines", [[], ["", ""], ["# only", "# remarks", ""]])
def test_a_file_without_sentences_is_refused(lines):
    assert "no sentences" in refused(lines)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing.conllu"):
        with pytest.raises(UserError, match=f"cannot read the treebank {path}"):
            read_treebank(path)


COLUMN = st.one_of(
    st.sampled_from(["_", "0", "1", "2", "3", "1-2", "2-3", "1.1", "0.1", "nsubj", "SpaceAfter=No", "é"]),
    st.text(max_size=5),
)
LINE = st.one_of(
    st.sampled_from([*GOOD, "", "# x"]), st.lists(COLUMN, min_size=9, max_size=11).map("\t".join), st.text()
)


@given(st.lists(LINE, max_size=12))
def test_any_lines_give_sentences_or_one_line_that_says_why_not(lines):
    try:
        sentences = read(lines)
    except UserError:
        refused(lines)
        return
    assert sentences
    for sentence in sentences:
        assert sentence.words
        for n, word in enumerate(sentence.words):
            assert 0 <= word.begin < word.end <= len(sentence.text)
            assert word.head != n
            assert word.head is None or 0 <= word.head < len(sentence.words)

"""Stop strings over token boundaries."""

import pytest
from rlhf_modeling.stop_strings import StopScanner

WORDS = ["<", "/to", "ol>", "x</tool>y", " hello", "</", "tool", ">", "é"]


def decode_words(ids):
    return "".join(WORDS[i] for i in ids)


def decode_bytes(ids):
    return bytes(list(ids)).decode("utf-8", errors="replace")


def first_stop(scanner, ids):
    return next((n for n, token in enumerate(ids, 1) if scanner.feed(token)), None)


@pytest.mark.parametrize(
    ("ids", "after"),
    [
        ([4, 0, 1, 2, 4], 4),  # "<" "/to" "ol>"
        ([4, 3, 4], 2),  # inside one token
        ([4, 5, 6, 7, 4], 4),
        ([4, 5, 5, 6, 7], 5),  # "</</tool>"
        ([4, 5, 6, 6, 7], None),  # "</tooltool>"
        ([8, 8, 0, 1, 8, 2], None),
    ],
)
def test_a_stop_string_is_found_at_the_token_that_completes_it(ids, after):
    assert first_stop(StopScanner(("</tool>",), decode_words), ids) == after


def test_any_of_several_stops_of_different_lengths():
    assert first_stop(StopScanner(("</tool>", "h"), decode_words), [5, 4, 7]) == 2
    assert first_stop(StopScanner(("o>", "zzz"), decode_words), [6, 7]) is None
    assert first_stop(StopScanner(("l>", "zzz"), decode_words), [6, 7]) == 2


def test_a_character_of_several_bytes_waits_for_its_last():
    ids = list("ab€c€".encode())
    assert first_stop(StopScanner(("c€",), decode_bytes), ids) == len(ids)
    assert first_stop(StopScanner(("b€",), decode_bytes), ids) == 5
    assert first_stop(StopScanner(("\ufffd",), decode_bytes), ids) is None


def test_a_stop_before_a_cut_character_is_found_at_once():
    cut = [b"ab", b"c\xe2", b"\x82\xac", b"c"]

    def decode(ids):
        return b"".join(cut[i] for i in ids).decode("utf-8", errors="replace")

    assert first_stop(StopScanner(("bc",), decode), [0, 1, 2]) == 2
    assert first_stop(StopScanner(("c€c",), decode), [0, 1, 2, 3]) == 4


def test_tokens_that_decode_to_nothing_are_passed_over():
    def decode(ids):
        return "".join("ab"[i] for i in ids if i < 2)

    assert first_stop(StopScanner(("ab",), decode), [0, 9, 9, 1]) == 4


def test_a_long_sample_is_not_decoded_from_its_start_at_every_token():
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return decode_words(ids)

    assert first_stop(StopScanner(("</tool>",), decode), [4] * 500) is None
    assert max(lengths) < 5

"""`connector/fill_calendar.py`: nobody who fills a block is passed over, and those far from it are left alone."""

import random

from connector.fill_calendar import FillCalendar


def test_a_request_is_due_after_as_many_steps_as_its_block_lacks_tokens() -> None:
    calendar = FillCalendar()
    calendar.expect("a", 3)
    calendar.expect("b", 1)
    one_each = {"a": 1, "b": 1}
    assert [list(calendar.take(one_each, 2)) for _ in range(4)] == [["b"], [], ["a"], []]
    assert len(calendar) == 0


def test_whoever_gets_more_than_one_token_is_looked_at_at_once_and_keeps_its_entry() -> None:
    calendar = FillCalendar()
    calendar.expect("prefill", 2)
    calendar.expect("decode", 3)
    assert list(calendar.take({"prefill": 512, "decode": 1}, 513)) == ["prefill"]
    assert list(calendar.take({"prefill": 1, "decode": 1}, 2)) == ["prefill"]
    assert list(calendar.take({"prefill": 1, "decode": 1}, 2)) == ["decode"]


def test_a_request_expected_again_or_forgotten_is_due_once_or_never() -> None:
    calendar = FillCalendar()
    calendar.expect("a", 1)
    calendar.expect("a", 2)
    calendar.expect("b", 2)
    calendar.forget("b")
    calendar.forget("never seen")
    assert [list(calendar.take({}, 0)) for _ in range(3)] == [[], ["a"], []]


def test_what_is_due_but_was_given_nothing_is_still_named() -> None:
    calendar = FillCalendar()
    calendar.expect("waits", 0)
    assert list(calendar.take({"other": 1}, 1)) == ["waits"]


def test_no_fill_is_missed_whatever_the_steps_give() -> None:
    """A thousand steps of random shares, drafts taken back among them, beside a look at every request."""
    dice = random.Random(5)
    for block_size in (1, 2, 16):
        calendar = FillCalendar()
        computed = {f"r{i}": dice.randrange(3 * block_size) for i in range(20)}
        full = dict.fromkeys(computed, 0)
        looked_at = num_scheduled = 0
        for request_id in computed:
            calendar.expect(request_id, 1)
        for _ in range(1000):
            usual = dice.random() < 0.7
            given = {r: 1 if usual else dice.randrange(1, 40) for r in computed if dice.random() < 0.9}
            num_scheduled += len(given)
            for request_id in calendar.take(given, sum(given.values())):
                looked_at += 1
                end = computed[request_id] + given.get(request_id, 0)
                full[request_id] = max(full[request_id], end // block_size)
                calendar.expect(request_id, (full[request_id] + 1) * block_size - end)
            for request_id, num_tokens in given.items():
                assert full[request_id] >= (computed[request_id] + num_tokens) // block_size
                computed[request_id] += num_tokens
                if num_tokens > 1 and dice.random() < 0.3:
                    computed[request_id] -= dice.randrange(num_tokens)
        assert block_size < 16 or looked_at < 0.6 * num_scheduled

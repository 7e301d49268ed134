"""Where a run may be saved, and how a script that comes by the same way finds the place again."""

from __future__ import annotations

from buoy.training.position import Loop, Position


def begun() -> Position:
    position = Position()
    position.counts_steps = True
    position.begin_epoch(0)
    return position


def body(position: Position, loop: Loop, *, step: bool) -> bool:
    """One batch and its body; whether the next request is a safe point."""
    position.hand_out(loop)
    if step:
        position.stepped()
    return position.asked(loop)


def test_a_point_is_safe_once_the_optimizer_has_stepped() -> None:
    position = begun()
    loop = position.begin_loop(1)

    assert position.asked(loop)
    assert [body(position, loop, step=step) for step in (False, False, True, False, True)] == [
        False, False, True, False, True,
    ]  # fmt: skip


def test_an_evaluation_is_safe_before_it_begins_and_after_its_epoch_only() -> None:
    position = begun()
    training = position.begin_loop(1)
    assert body(position, training, step=True)
    position.end_loop(training)

    evaluation = position.begin_loop(2)

    assert position.asked(evaluation)
    assert not body(position, evaluation, step=False)
    assert not body(position, evaluation, step=False)
    position.end_loop(evaluation)
    assert position.is_settled


def test_an_epoch_that_ends_within_an_accumulation_is_not_settled() -> None:
    position = begun()
    loop = position.begin_loop(1)
    body(position, loop, step=True)
    body(position, loop, step=False)
    position.end_loop(loop)

    assert not position.is_settled


def test_loops_side_by_side_are_safe_at_the_first_one_only() -> None:
    position = begun()
    first, second = position.begin_loop(1), position.begin_loop(2)
    for loop in (first, second):
        position.asked(loop)
        position.hand_out(loop)
    position.stepped()

    assert position.asked(first)
    position.hand_out(first)
    assert not position.asked(second)


def test_a_loop_inside_the_body_of_another_is_never_safe() -> None:
    position = begun()
    outer = position.begin_loop(1)
    position.asked(outer)
    position.hand_out(outer)
    inner = position.begin_loop(2)

    assert not position.asked(inner)
    assert not body(position, inner, step=True)
    position.end_loop(inner)
    assert position.asked(outer)


def test_without_an_optimizer_the_first_loop_is_safe() -> None:
    position = Position()
    first, second = position.begin_loop(1), position.begin_loop(2)

    position.hand_out(first)
    assert not position.asked(second)
    position.hand_out(second)
    assert position.asked(first)


def test_the_way_back_passes_over_what_was_done() -> None:
    position = begun()
    position.end_loop(position.begin_loop(1))
    second = position.begin_loop(2)
    second.place = lambda: {"samples": 8}
    saved = position.describe()

    again = Position(saved)
    again.begin_epoch(0)

    assert again.begin_loop(7).done
    resumed = again.begin_loop(8)
    assert not resumed.done and resumed.saved == {"samples": 8}
    assert again.arrive() and again.repeats
    assert not again.begin_loop(9).done and not again.arrive()


def test_an_iterator_begun_anew_in_a_body_is_found_by_its_first_beginning() -> None:
    position = begun()
    more = position.begin_loop(1)
    main = position.begin_loop(2)
    position.hand_out(main)
    position.end_loop(more)
    more = position.begin_loop(1)  # number 2
    for loop, samples in ((main, 12), (more, 4)):
        loop.place = lambda samples=samples: {"samples": samples}  # type: ignore[misc]
    saved = position.describe()

    again = Position(saved)
    again.begin_epoch(0)
    resumed, rest = again.begin_loop(1), again.begin_loop(2)

    assert (resumed.number, resumed.saved) == (2, {"samples": 4})
    assert (rest.number, rest.saved) == (1, {"samples": 12})
    assert again.begin_loop(1).number == 3


def test_a_finished_epoch_is_not_entered_again() -> None:
    position = begun()
    position.end_loop(position.begin_loop(1))

    again = Position(position.describe(epoch_done=True))

    assert again.first_epoch == 1 and not again.is_returning

"""The alert about input that the devices wait for."""

from trainer.callbacks import Loop
from trainer.callbacks.slow_input import SlowInput


def _loop(step: int, seconds: float, waited: float, first: bool = False) -> Loop:
    return Loop(step, step + 1, seconds, waited, {}, 0.1, first)


def test_it_is_told_once_and_again_after_it_was_better() -> None:
    told: list[tuple[str, int]] = []
    callback = SlowInput(lambda message, step: told.append((message, step)))
    minutes = [0.0, 0.5, 0.5, 0.2, 0.4, 0.1, 0.5]  # share of each minute; 0.2 is no recovery
    for minute, share in enumerate(minutes):
        for tenth in range(10):
            callback.on_loop_end(_loop(10 * minute + tenth, 6.0, 6.0 * share))
    assert [step for _, step in told] == [20, 70]
    assert "waited for input 50% of the last minute" in told[0][0]
    assert "--mode=profile_input" in told[0][0]


def test_one_slow_batch_and_the_compiling_loop_are_no_news() -> None:
    told: list[str] = []
    callback = SlowInput(lambda message, step: told.append(message))
    callback.on_loop_end(_loop(0, 300.0, 290.0, first=True))
    callback.on_loop_end(_loop(1, 10.0, 10.0))
    for step in range(2, 12):
        callback.on_loop_end(_loop(step, 6.0, 0.0))
    assert told == []

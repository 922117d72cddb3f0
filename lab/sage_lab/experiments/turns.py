"""Orders in which candidates take turns, so that none always follows the same other."""

from collections.abc import Iterator


def orders(count: int, repetitions: int) -> Iterator[list[int]]:
    """Yield orders of `count` places; over 2 * count repetitions each place follows every other equally often.

    This is E. J. Williams' balanced design (1949): 0, n-1, 1, n-2, ..., shifted by one each time, then backwards.
    """
    zigzag = [place // 2 if place % 2 == 0 else count - 1 - place // 2 for place in range(count)]
    for repetition in range(repetitions):
        order = [(place + repetition) % count for place in zigzag]
        yield order[::-1] if repetition // count % 2 else order

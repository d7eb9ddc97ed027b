"""Write a number as a formula with the root of a whole number, such as 1/sqrt(64) for 0.125; round it to a narrower dtype."""

from __future__ import annotations

import math

MAX_ROOT, EXACT_ROOT = 1 << 14, 1e-6  # a factor near the root of a whole number, which is no chance for small ones
SHORT = 5  # characters of a factor that says what it is: 0.125

NARROW = {"bfloat16": 8, "float16": 11}  # bits of a number's fraction, with the first


def round_to_bits(number: float, bits: int) -> float:
    """Round a number to so many bits.

    >>> round_to_bits(12**0.5, NARROW["bfloat16"])
    3.46875
    """
    fraction, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)


def factor_text(factor: float) -> str:
    """Write a factor, with the root that it is.

    >>> factor_text(0.40824829), factor_text(48**0.5), factor_text(1 / 3), factor_text(0.997213)
    ('0.4082483 = 1/sqrt(6)', '6.928203 = sqrt(48)', '0.3333333 = 1/3', '0.997213')
    """
    number = f"{factor:.7g}"
    if (
        not 1 / (MAX_ROOT + 1) < abs(factor) < MAX_ROOT + 1
    ):  # zero and what is no number, too: a record has any constant
        return number
    for inverse in (False, True):
        size = 1 / abs(factor) if inverse else abs(factor)
        for power, text in ((1, "{}"), (2, "sqrt({})")):
            whole = round(size**power)
            if 1 < whole <= MAX_ROOT and abs(size**power / whole - 1) < EXACT_ROOT:
                root = ("-" if factor < 0 else "") + ("1/" if inverse else "") + text.format(whole)
                return number if len(number) <= SHORT else f"{number} = {root}"
    return number

"""How numbers are written for eyes."""

import math

import pytest

from mpitrain.system.sizes import significant


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.97213, 4, "0.9721"),
        (12346.4, 4, "12346"),
        (-9999.7, 4, "-10000"),
        (123456.7, 5, "123457"),
        (2.5e-5, 4, "2.5e-05"),
        (1e20, 4, "1e+20"),
        (0.0, 4, "0"),
        (math.inf, 4, "inf"),
        (math.nan, 4, "nan"),
    ],
)
def test_whole_digits_stand_in_place_of_a_power_of_ten(value, digits, text):
    assert significant(value, digits) == text

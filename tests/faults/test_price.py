"""What a fault costs (`price.py`), held to its bounds. Time is asserted with slack; that nobody is asked any more is
asserted exactly.
"""

import pytest

from tests.faults import price
from tests.faults.engines import LOOKUP_S, Fleet

pytestmark = [pytest.mark.engine, pytest.mark.long]  # seven minutes on two cores

SLACK = 3
NEXT_S = 0.001
RETURN_S = 10.0

CASES = [
    (fault, path)
    for path in price.PATHS
    for fault in (*price.FAULTS, *(price.MID_LOAD_FAULTS if path == "streams" else ()))
]


@pytest.mark.parametrize(("fault", "path"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_the_first_request_pays_a_deadline_and_the_next_ones_nothing(fleet: Fleet, fault, path: str) -> None:
    row = fault(fleet, path)
    print(row)

    meanwhile = [one for one in row.following if not one.is_good_hit]
    assert row.first.total_s < SLACK * row.bound_s
    assert all(one.none_s < SLACK * LOOKUP_S for one in meanwhile)
    if not row.is_alive:
        assert [one.none_s + one.load_s for one in meanwhile] == [0.0] * len(meanwhile), "nobody is asked"
        assert min(one.hooks_s for one in meanwhile) < SLACK * NEXT_S
    if row.back_s is not None:
        assert row.back_s < RETURN_S

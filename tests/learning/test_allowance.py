import pytest

from livedraft.drafts.database import write_status
from livedraft.learning.allowance import AWAY_SECONDS, SHARES, Allowance


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def served(tmp_path, clock):
    def say(serve_flops):
        write_status(tmp_path, "serving", {"serve_flops": serve_flops})
        clock[0] += 1.0  # what was read a moment ago is not read again

    return say


def test_gentle_training_takes_its_share_of_what_serving_takes(tmp_path, clock, served):
    allowance = Allowance(tmp_path, "gentle", now=lambda: clock[0])
    served(1000.0)
    assert allowance.is_spent(500.0, 0.0)  # the account opens empty: what came before does not count
    served(2000.0)
    share = SHARES["gentle"] * 1000.0
    assert not allowance.is_spent(500.0 + share - 1, 0.0)
    assert allowance.is_spent(500.0 + share, 0.0)
    served(3000.0)
    assert not allowance.is_spent(500.0 + share, 0.0)


def test_idle_compute_is_free_and_the_next_request_opens_a_new_account(tmp_path, clock, served):
    allowance = Allowance(tmp_path, "gentle", now=lambda: clock[0])
    served(1000.0)
    assert allowance.is_spent(0.0, 0.0)
    assert not allowance.is_spent(0.0, AWAY_SECONDS + 0.1)
    assert not allowance.is_spent(9000.0, AWAY_SECONDS + 0.1)
    assert allowance.is_spent(9000.0, 0.0)
    served(2000.0)
    assert not allowance.is_spent(9000.0, 0.0)


def test_a_serving_process_that_starts_again_counts_from_nothing(tmp_path, clock, served):
    allowance = Allowance(tmp_path, "gentle", now=lambda: clock[0])
    served(1e6)
    assert allowance.is_spent(0.0, 0.0)
    served(100.0)
    assert allowance.is_spent(0.0, 0.0)
    served(1100.0)
    assert not allowance.is_spent(0.0, 0.0)


@pytest.mark.parametrize("level", ["on", "eager"])
def test_the_other_levels_have_no_limit(tmp_path, clock, served, level):
    served(1.0)
    assert not Allowance(tmp_path, level, now=lambda: clock[0]).is_spent(1e9, 0.0)


def test_where_nobody_says_what_serving_takes_there_is_no_limit(tmp_path):
    assert not Allowance(tmp_path, "gentle").is_spent(1e9, 0.0)

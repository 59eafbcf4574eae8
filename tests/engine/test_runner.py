from livedraft.engine.runner import Runner, _never_falling
from tests.tiny import decoder, draft_model, perturbed_draft, random_model


def test_costs_never_fall_with_the_number_of_rows():
    assert _never_falling({1: 5.0, 2: 4.0, 4: 9.0, 3: 6.0}) == {1: 4.0, 2: 4.0, 3: 6.0, 4: 9.0}
    assert _never_falling({}) == {}


def test_costs_are_measured_for_every_count_the_cache_holds():
    model = random_model()
    target = decoder(model, num_slots=3, max_length=40)
    draft = draft_model(perturbed_draft(model, noise=0.0), target)
    costs = Runner(target).measure_costs(draft)
    assert set(costs.draft_seconds_by_requests) == {1, 2}
    assert max(costs.target_seconds_by_rows) == 32
    values = list(costs.target_seconds_by_rows.values())
    assert values == sorted(values)
    assert all(seconds > 0 for seconds in values)

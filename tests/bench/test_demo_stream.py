from livedraft.bench.demo_stream import plant_shop_prompts, repeated_share


def test_no_prompt_occurs_twice_and_the_seed_fixes_them():
    prompts = plant_shop_prompts(410, seed=0)
    assert len(set(prompts)) == 410
    assert prompts == plant_shop_prompts(410, seed=0)
    assert prompts[:200] == plant_shop_prompts(200, seed=0)
    assert len(set(prompts) & set(plant_shop_prompts(410, seed=1))) < 5


def test_repeated_share_counts_grams_seen_in_training():
    training = [list(range(20))]
    assert repeated_share([list(range(5, 15))], training) == 1.0
    assert repeated_share([list(range(100, 115))], training) == 0.0
    assert repeated_share([[*range(12), *range(100, 111)]], training) == 5 / 16
    assert repeated_share([[1, 2]], training) == 0.0

import subprocess
import sys

import pytest

from livedraft.bench.demo_stream import plant_shop_prompts, repeated_share
from livedraft.bench.prompts import read_prompts


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


def printed(*arguments):
    command = [sys.executable, "-m", "livedraft.bench.demo_stream", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_writes_a_prompt_file_for_the_benches(tmp_path):
    file = tmp_path / "held.jsonl"
    file.write_text(printed(5, 9, "--seed", 3).stdout)
    asked = [messages[-1]["content"] for messages in read_prompts(file, 100)]
    assert asked == plant_shop_prompts(9, seed=3)[5:]


@pytest.mark.parametrize("wrong", [(5, 5), (0, 10**9)])
def test_the_command_refuses_what_it_cannot_write(wrong):
    result = printed(*wrong)
    assert result.returncode != 0
    assert "start < stop" in result.stderr and "Traceback" not in result.stderr

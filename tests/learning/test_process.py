"""The training process before it trains."""

import os
import subprocess
import sys


def test_it_ends_with_its_parent_also_in_the_middle_of_its_imports(tmp_path):
    """At idle priority they take as long as others want the cores; after a kill nothing may be left over."""
    (tmp_path / "torch.py").write_text("import time\nopen('importing', 'w').close()\ntime.sleep(120)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "livedraft.learning", "--state", "s", "--target", "t"],
        stdin=subprocess.PIPE, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    try:
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()

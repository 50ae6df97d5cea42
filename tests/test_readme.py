"""The README's examples run as they stand there and print what it says."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def run(code):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(code, str(README), "exec"), {"__name__": "readme"})
    assert shown.getvalue().strip() == code.splitlines()[-1].removeprefix("# ")


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_example_prints_what_the_readme_says():
    code, models, pool, *sketches = blocks()
    assert "kda_jax.models" in models and "state_cache" in pool
    for sketch in sketches:  # with the reader's own model in it
        compile(sketch, str(README), "exec")
    assert len(code.splitlines()) <= 15
    run(code)


def test_example_of_the_models():
    code = blocks()[1]
    assert len(code.splitlines()) <= 24
    run(code)


def test_example_of_a_pool():
    code = blocks()[2]
    assert len(code.splitlines()) <= 24
    run(code)

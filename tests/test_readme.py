"""The README's examples run as they stand there and print what it says."""

import contextlib
import io
import re
from pathlib import Path

import jax
import readme_shell
from jax.experimental.compilation_cache import compilation_cache

OPTIONS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
README = Path(__file__).parents[1] / "README.md"


def run(code):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(code, str(README), "exec"), {"__name__": "readme"})
    assert shown.getvalue().strip() == code.splitlines()[-1].removeprefix("# ")


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_example_prints_what_the_readme_says():
    code, models, pool, warm_up = blocks()  # each has a test
    assert "kda_jax.models" in models and "state_cache" in pool and "warmup" in warm_up
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


def test_example_of_a_warm_up(tmp_path):
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    try:
        run(blocks()[3].replace("/tmp/kda_programs", str(tmp_path)))
        assert list(tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_commands_of_the_server_are_found():
    """test_prefix_check.py runs them, where a server of that model runs anyway."""
    found = readme_shell.commands()
    assert len(found) == 6
